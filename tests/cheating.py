"""The cheats of tests/cheats as arms of ablations and as proposals, run in isolated trials by a runner of blocks.

The docstring of a cheat says what it does, after which public report, and the right answer of the product: by group
(what decides, and whether an evaluation measures it) a word of `WORDS`, and words of the answer or the reason.
"""

import ast
import json
import runpy
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.proposals import outcome_of, proposal_problems, proposed
from ablate.experiments.analysis.verdicts import Cause, VariantVerdict, Verdict
from ablate.experiments.design.load import load_values, parse_spec
from ablate.experiments.design.plan import make_plan
from ablate.experiments.design.spec_yaml import spec_yaml
from ablate.experiments.outcomes import BASELINE, Decision, FailureClass, Outcome, ProposalOutcome, VerdictWord
from ablate.experiments.records.circumstances import CALIBRATED
from ablate.experiments.records.code_archive import pack_code
from ablate.experiments.records.plan_file import make_plan_file
from ablate.experiments.records.receipts import Receipt
from ablate.experiments.records.spec_code import PackedSpec, pack_spec
from ablate.experiments.retries import Break
from ablate.workers.processes.trial_output import BlockOutput
from tests.integration.block_runners import block_runner, endless_lease

YAML = "application/yaml"
FOLDER = Path(__file__).with_name("cheats")
PARTS = ("lab", "honest", "judge")
SEEDS = [1, 2, 3, 4, 5, 6]
WORDS = {
    "fails": "the trial fails",
    "invalid": "the trial is invalid",
    "no answer": "no answer",
    "rejected": "rejected",
    "nothing": "gains nothing",
    "named": "kept, and named",
    "kept": "**kept**",
}
"""Answers, and how the page says them."""
SPEED = {"metric": "tokens_per_s", "margin": "20%", "adopt_if": "50%"}
LOSS = {"metric": "val_loss", "margin": "0.5%", "adopt_if": "1%"}
VAL_LOSS = {"metrics": {"val_loss": {"better": "lower"}}}
JUDGED = {**VAL_LOSS, "evaluate": {"command": ["python", "judge.py"], "code": "judging"}}


class Group(NamedTuple):
    """What decides about a cheat."""

    title: str
    verdict: Mapping[str, Any]
    workload: Mapping[str, Any]


REQUIRED = [{"metric": "val_loss", "not_worse_by": "1%"}]
GROUPS = {
    "Speed": Group("speed", {"primary": SPEED}, {}),
    "Judged": Group("speed at an evaluated loss", {"primary": SPEED, "require": REQUIRED}, JUDGED),
    "Loss": Group("reported loss", {"primary": LOSS}, VAL_LOSS),
    "Memory": Group(
        "speed within a limit of memory",
        {"primary": SPEED, "require": [{"metric": "peak_reserved_gib", "max_value": 0.35}]},
        {},
    ),
    "Proposed": Group("evaluated loss", {"primary": LOSS}, JUDGED),
    "Shared": Group(
        "evaluated loss, with the program's code",
        {"primary": LOSS},
        {**VAL_LOSS, "evaluate": ["python", "judge.py"]},
    ),
}
SESSIONS = ("Proposed", "Shared")


class Expected(NamedTuple):
    """The right answer in one group."""

    word: str
    words: str


@dataclass(frozen=True)
class Cheat:
    """One program, by its header."""

    name: str
    does: str
    reports: str
    file: str
    env: Mapping[str, str]
    answers: Mapping[str, Expected]
    on_gpu: bool
    """Run by hand; docs/receipts/2026-11-30-short-runs-h200x2 has the answers."""


@cache
def cheats() -> dict[str, Cheat]:
    """Return all cheats by name."""
    paths = sorted(path for path in FOLDER.glob("*.py") if path.stem not in PARTS)
    return {path.stem: _cheat(path) for path in paths}


def _cheat(path: Path) -> Cheat:
    does, _, rest = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n\n")
    fields = dict(line.split(": ", 1) for line in rest.splitlines())
    answers = {group: Expected(*fields.pop(group).split("; ", 1)) for group in GROUPS if group in fields}
    reports, file, env = fields.pop("Report"), fields.pop("File", "train.py"), fields.pop("Env", "")
    on_gpu = fields.pop("Needs", "") == "a GPU"
    assert fields == {}, f"{path.name}: {fields}"
    assert answers, path.name
    assert {answer.word for answer in answers.values()} <= WORDS.keys(), path.name
    return Cheat(path.stem, does, reports, file, dict([env.split("=")] if env else []), answers, on_gpu)


def of_group(group: str) -> list[str]:
    """Return the names of the cheats that can run here in a group."""
    return [name for name, one in cheats().items() if group in one.answers and not one.on_gpu]


class Ran(NamedTuple):
    """An ablation with cheats as its variants."""

    receipts: Sequence[Receipt]
    verdict: Verdict

    def answer(self, name: str) -> VariantVerdict:
        """Return the verdict on one of them."""
        return next(one for one in self.verdict.variants if one.arm == _arm(name))


def ran(group: str, names: Iterable[str], folder: Path, *, blocks: int = 6) -> Ran:
    """Run cheats beside the baseline of their group."""
    names = list(names)
    values = _values(group, folder)
    values["variants"] = {_arm(name): {"code": name, "env": dict(cheats()[name].env)} for name in names}
    for name in names:
        _write(folder / name, cheats()[name], group)
    packed = pack_spec(spec_yaml(values), YAML, folder)
    return _run(packed, packed.content, [packed], folder / "home", blocks=blocks)


def tried(group: str, name: str, folder: Path) -> tuple[ProposalOutcome, VariantVerdict]:
    """Propose a cheat to a session whose incumbent is the baseline, as `ablate try` does; return its answer."""
    values = _values(group, folder)
    opened = pack_spec(spec_yaml({**values, "variants": {"proposal": {"code": BASELINE}}}), YAML, folder)
    _write(folder / name, cheats()[name], group)
    receipt = {"evaluation": {"code": pack_code(folder / "judging").tree}}  # as the receipts of earlier proposals say
    (folder / name / "receipt.json").write_text(json.dumps(receipt))
    proposal = {**load_values(opened.content, YAML), "variants": {"proposal": {"code": name}}}
    packed = pack_spec(spec_yaml(proposal), YAML, folder)
    spec, incumbent = parse_spec(packed.content, YAML), parse_spec(opened.content, YAML)
    assert list(proposal_problems(spec, incumbent, "night")) == []
    text, _spec = proposed(packed.content, YAML, spec, "night", number=1, kept=())
    verdict = _run(packed, text, [opened, packed], folder / "home").verdict
    return outcome_of(verdict), verdict.variants[0]


def _arm(name: str) -> str:
    return name.replace("_", "-")


def _values(group: str, folder: Path) -> dict[str, Any]:
    """Write the code of the baseline and of the evaluation; return the spec without its variants."""
    own = GROUPS[group]
    _write_parts(folder / BASELINE, with_answers=group == "Shared")
    _write_parts(folder / "judging", with_answers=True)
    return {
        "ablation": f"cheats-{group.lower()}",
        "question": "Is it better, or does it look so?",
        "workload": {
            "command": ["python", "train.py", "{seed}", "{out}"],
            "code": BASELINE,
            "env": {"OMP_NUM_THREADS": "1"},
            "steps": {"warmup": 1, "timed": 20},
            **own.workload,
        },
        "design": {"seeds": SEEDS, "blocks": {"count": 6}},
        "placement": {"node_class": "cpu", "max_foreign_load": "99%"},
        "verdict": dict(own.verdict),
    }


def _write_parts(folder: Path, *, with_answers: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        shutil.copy(FOLDER / f"{part}.py", folder)
    shutil.copy(FOLDER / "honest.py", folder / "train.py")
    if with_answers:
        (folder / "held_out.json").write_text(json.dumps(_held_out()))


@cache
def _held_out() -> Any:
    """Return rows that no program can draw."""
    return runpy.run_path(str(FOLDER / "lab.py"))["rows"](secrets.token_hex())


def _write(folder: Path, cheat: Cheat, group: str) -> None:
    _write_parts(folder, with_answers=group == "Shared")
    shutil.copy(FOLDER / f"{cheat.name}.py", folder / cheat.file)


def _run(packed: PackedSpec, text: bytes, sources: Sequence[PackedSpec], home: Path, *, blocks: int = 6) -> Ran:
    archives = {one.digest: one for source in sources for one in source.archives}

    def pieces(_attempt: str, digest: str) -> Iterator[bytes]:
        return archives[digest].pieces()

    spec = parse_spec(text, packed.content_type)
    plan = make_plan(spec).model_copy(update={"max_foreign_load": 1.0})  # other tests may take every core
    file = make_plan_file(plan, spec_text=text.decode(), content_type=YAML, code={})
    receipts: list[Receipt] = []
    with block_runner(home, pieces) as runner:
        for block in file.plan.blocks[:blocks]:
            last = [Break(block.index, FailureClass.INVALID_MEASUREMENT, None)] * 2  # a third one is a result
            claimed = file.claimed(block.index, attempt_id=f"att_{block.index}", attempt_no=3, broken=last)
            receipts += runner.run(claimed, endless_lease(), BlockOutput())
    return Ran(receipts, judge(file.plan, spec, receipts, CALIBRATED))


def trial_problem(name: str, expected: Expected, receipts: Sequence[Receipt]) -> str | None:
    """Return what is wrong with the trials of a cheat whose trials end by their fault; None if nothing is."""
    outcome = Outcome.FAILED if expected.word == "fails" else Outcome.INVALID
    own = [receipt for receipt in receipts if receipt.arm == _arm(name)]
    ends = [(receipt.outcome, receipt.message) for receipt in own]
    right = own and all(end == outcome and expected.words in str(message) for end, message in ends)
    return None if right else f"{ends}, not {outcome}: {expected.words}"


def answer_problem(expected: Expected, answer: VariantVerdict) -> str | None:
    """Return what is wrong with the answer about a cheat; None if nothing is."""
    texts = [answer.reason, *answer.notes, *answer.contradictions, *(str(one) for one in answer.requirements)]
    is_noisy = answer.cause in (Cause.SPREADS, Cause.STALLS)  # a busy machine takes the word from any program
    adopted = answer.decision is Decision.ADOPT or is_noisy
    missed = any(not one.passed and not one.undecided for one in answer.requirements)
    right = {
        "fails": answer.verdict is VerdictWord.FAILED,
        "invalid": answer.verdict is VerdictWord.INVALID,
        "no answer": answer.decision is Decision.INCONCLUSIVE and expected.words in str(texts),
        "rejected": missed and (answer.decision is Decision.REJECT or is_noisy) and expected.words in str(texts),
        "nothing": answer.verdict in (VerdictWord.SAME, VerdictWord.WORSE, VerdictWord.INCONCLUSIVE),
        "named": adopted and expected.words in str(texts),
        "kept": adopted,
    }[expected.word]
    return None if right else f"{answer.verdict}, {answer.decision}: {texts}; expected: {expected}"
