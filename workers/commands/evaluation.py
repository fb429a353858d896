"""Measure the declared metrics of a program that has ended, by a command that no arm changes.

The evaluation runs after the program, as other processes with the same isolation. Its code, home, temporary files and
environment are its own: nothing that the program wrote is on a path from which something is imported or configured.
"""

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from ablate.experiments.design.kinds.program import ProgramArm
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.code_tree import LEFT_OUT, tree_digest
from ablate.experiments.records.program_report import OUT, EvaluationReport, contradicts
from ablate.experiments.system.isolation import Isolation
from ablate.model.errors import DataError
from ablate.workers.commands.advice import ProgramPlace
from ablate.workers.commands.code_copy import link_data
from ablate.workers.commands.program_end import ProgramEnd, program_failure, run_to_end
from ablate.workers.commands.program_start import ProgramFolders
from ablate.workers.isolation.node_secrets import Mask
from ablate.workers.paths import remove_tree
from ablate.workers.trials.result import TrialOrder

RUN_FOLDER = "ABLATE_RUN_FOLDER"
"""Variable with the working folder of the program that is evaluated."""
_SAME_SHARE = 1e-3
"""Numbers of program and evaluation contradict each other from this share on: they may differ in precision or batch."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """An evaluation that has ended."""

    report: EvaluationReport | None = None
    """None of one that could not be started."""
    measured: Mapping[str, float] = field(default_factory=dict)
    failure: tuple[FailureClass, str] | None

    def contradicted(self, program: ProgramEnd) -> dict[str, float]:
        """Return the numbers of the program that contradict those that count."""
        own = {name: value for name, value in program.contradicted.items() if name not in self.measured}
        for name, other in program.reported.items():
            value = self.measured.get(name, other)
            if not math.isclose(other, value, rel_tol=_SAME_SHARE) and contradicts(other, value):
                own[name] = other
        return own


def evaluate(order: TrialOrder, program: ProgramEnd, log: BinaryIO) -> Evaluated:
    """Run the evaluation of a program all of whose processes have ended well. Raises DataError if its code changed."""
    config, own, judge, mask = order.program, order.program.evaluate, order.program.judge, Mask(order.secrets)
    if own is None or judge is None:
        raise AssertionError("this program has no evaluation")
    folders, run_folder = _own_folders(order, judge), order.paths.folder / "code"
    _begin_log(log, own.title)
    undeclared = {name: value for name, value in program.reported.items() if name not in config.metrics}
    try:
        ran = run_to_end(
            order,
            judge,
            folders,
            log,
            lines=judge.lines,
            who=own.title,
            variables={RUN_FOLDER: str(run_folder)},
            reach=_reach(order),
            before=undeclared,
        )
    except DataError as error:
        return Evaluated(failure=(FailureClass.USER_ERROR, f"{own.title}: {error}"))
    failure = program_failure(judge, ran.end)
    if failure is not None:
        place = replace(
            ProgramPlace.of(order, judge, judge.argv(out=str(folders.out))),
            code=order.evaluation,
            run_folder=run_folder,
        )
        named = failure[1] if own.title in failure[1] else f"{own.title}: {failure[1]}"
        failure = failure[0], place.advised(mask.text(named))
    remove_tree(order.paths.evaluation)
    report = EvaluationReport(
        argv=tuple(judge.argv(out=OUT)),
        code=_digest(order),
        metrics=tuple(sorted(ran.reported)),
        exit_code=ran.end.exit_code,
    )
    return Evaluated(report=report, measured=ran.reported, failure=failure)


def _own_folders(order: TrialOrder, judge: ProgramArm) -> ProgramFolders:
    """Return folders that no process of the program has seen; the program's own one for files is to be read."""
    paths = order.paths
    for folder in (paths.evaluation, paths.temporary):
        paths.make_empty(folder)
    working, home = paths.evaluation / "code", paths.evaluation / "home"
    home.mkdir()
    shutil.copytree(_code(order), working, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    if tree_digest(working) != _digest(order):  # possible where nothing isolates
        raise DataError("this node's copy of the evaluation's code was changed while the program ran")
    link_data(judge, working)
    return ProgramFolders(working=working, out=paths.folder / "out", home=home)


def _code(order: TrialOrder) -> Path:
    if order.evaluation is None:
        raise AssertionError("the code of this evaluation was not prepared")
    return order.evaluation


def _digest(order: TrialOrder) -> str:
    return f"sha256:{_code(order).name}"


def _reach(order: TrialOrder) -> Isolation | None:
    """Return what the evaluation may use: as the program, but of the trial's files it only writes its own."""
    if order.isolation is None:
        return None
    readable = (*order.isolation.readable, order.paths.folder)
    return replace(order.isolation, readable=readable, writable=(order.paths.evaluation, order.paths.temporary))


def _begin_log(log: BinaryIO, title: str) -> None:
    """Write to the trial's log that the evaluation begins."""
    log.write(f"\n[{title}]\n".encode())
    log.flush()
