"""Whatever a program sends or leaves, its trial has a receipt that the service takes, and the node is not to blame."""

import contextlib
import json
import math
import os
import random
import socket
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ablate.experiments.design.kinds.program import ProgramArm
from ablate.experiments.digest import canonical_json
from ablate.experiments.documents import write_whole
from ablate.experiments.outcomes import FailureClass, Outcome
from ablate.experiments.records.identity import ClaimedBlock
from ablate.experiments.records.plan_file import make_plan_file
from ablate.experiments.records.receipt_check import verify
from ablate.experiments.records.receipts import Receipt
from ablate.workers.blocks.receipt import TrialRecord
from ablate.workers.commands.program import result_of
from ablate.workers.commands.program_end import ProgramEnd, ProgramRun, not_finite, program_failure
from ablate.workers.commands.ranks import ProgramMarks
from ablate.workers.errors import BlockBroken
from ablate.workers.node import Node, find_node
from ablate.workers.paths import TrialPaths, WorkPaths
from ablate.workers.processes.runner import Ending
from ablate.workers.processes.trial_output import BlockOutput
from ablate.workers.trials import failures
from ablate.workers.trials.result import TrialResult, read_result, read_steps
from tests.program_receipts import plan_of, program_values
from tests.unit.workers.processes.test_program_messages import changed

NUMBER_OF_TRIALS = 700
"""Each sends about 15 messages."""


@cache
def claimed() -> tuple[ClaimedBlock, Node, ProgramArm]:
    _spec, plan = plan_of()
    file = make_plan_file(plan, spec_text=canonical_json(program_values()), content_type="application/json")
    block = file.claimed(0, attempt_id="att_1", attempt_no=1)
    return block, find_node("here", "cpu"), block.trials[0].config


def record_of(paths: TrialPaths, **ending: Any) -> TrialRecord:
    block, node, _config = claimed()
    fields = {"wall_s": 30.0, "stopped": None, "exit_code": 0, "oom_kills": 0, "peak_rss_bytes": None, "survivors": ()}
    return TrialRecord(
        block=block,
        trial=block.trials[0],
        node=node,
        node_id="nod_1",
        paths=paths,
        ending=Ending(**{**fields, **ending}),
        started_at=datetime.now(UTC) - timedelta(seconds=30),
        load_average=0.1,
        device_events=(None,),
        foreign_busiest=(),
    )


def messages_of(config: ProgramArm, rng: random.Random) -> list[dict[str, Any]]:
    """Return the messages of a program of one rank that does everything right."""
    at = rng.uniform(100, 10_000)
    moments = [at := at + rng.uniform(1e-4, 2.0) for _ in range(config.steps.total + 2)]
    began, *ends, closed = moments
    first = 1 + config.steps.warmup
    packages = {"torch": "2"}
    messages: list[dict[str, Any]] = [
        {"event": "began", "at": began, "world": 1, "process": 1, "python": "3.12", "implementation": "CPython"},
        {"event": "window began", "at": ends[first - 1]},
        {"event": "window ended", "at": ends[-1]},
        *({"event": "steps", "steps": [[i, end, 10, rng.choice([0.5, None])]]} for i, end in enumerate(ends)),
        {"event": "losses", "losses": [[i, rng.choice([1.0, -1e308, 1e308])] for i in range(len(ends))]},
        {"event": "tokens", "tokens": [[i, 10] for i in range(len(ends))]},
        {"event": "reported", "values": {"val_bpb": rng.choice([1.5, 0.0, 1e308]), "x\u202e<b>": 5e-324}},
        {"event": "kernels", "rows": [["aten::mm", 3, 70.5, {"registers": 168, "grid": [8, 8, 1], "occupancy": 0.25}]]},
        {"event": "ended", "at": closed, "seed": config.seed, "whole": True, "packages": packages, "memory": [1, 2]},
    ]
    return [{"rank": 0, **message} for message in messages]


def disturbed(messages: list[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
    """Change, drop, repeat or move some messages, or shift a moment a little."""
    for _ in range(rng.choice([1, 1, 2, 4])):
        place = rng.randrange(len(messages))
        kind = rng.randrange(7)
        if kind < 2:
            messages[place] = changed(messages[place], rng)
        elif kind == 2:
            messages.pop(place)
        elif kind == 3:
            messages.insert(rng.randrange(len(messages)), messages[place])
        elif kind == 4:
            messages.insert(rng.randrange(len(messages)), messages.pop(place))
        elif kind == 5:
            messages.append({"event": "losses", "rank": 0, "losses": [[rng.randrange(6), math.nan]]})
        else:
            moment = rng.choice([message for message in messages if "at" in message] or [{"at": 0.0}])
            if isinstance(moment["at"], float):
                moment["at"] += rng.choice([-1e9, -2.0, -1e-9, 0.0, 1e-9, 2.0, 1e8])
    return messages


def ran(messages: list[dict[str, Any]], config: ProgramArm, clock: random.Random) -> TrialResult:
    """Return the result that the process of a trial makes of the messages."""
    marks, seen = ProgramMarks(config), 1000.0
    for message in messages:
        at = message.get("at")
        seen = at if isinstance(at, float) and clock.random() < 0.9 else seen
        marks.take(json.dumps(message).encode(), seen)
    end = ProgramEnd(
        exit_code=0,
        oom_kills=0,
        reported={**marks.reported, **not_finite({})},
        last_line="",
        failed=marks.failed,
        wrong=marks.wrong,
        loops=marks.loops,
        lost=(),
        stopped=False,
        left=(),
        most_bytes=2**30,
        reached=False,
    )
    program = ProgramRun(end=end, marks=marks, reported=marks.reported)
    result = result_of(config, program, None, code=None)
    failure = program_failure(config, end)
    own = {"peak_allocated_bytes": 1, "peak_reserved_bytes": 1, "foreign_load": 0.01, "process_s": 2.0}
    extra = {} if failure is None else {"failure_class": failure[0], "message": failure[1]}
    return result.model_copy(update={**own, **extra})


def judged(record: TrialRecord) -> Receipt | FailureClass:
    """Return the receipt, or the class by which the trial breaks its block."""
    try:
        receipt = record.receipt()
    except BlockBroken as broken:
        return broken.failure_class
    assert verify(json.loads(receipt.model_dump_json())) == []
    return receipt


def test_drawn_messages_give_a_receipt_and_never_speak_against_the_node(tmp_path: Path) -> None:
    rng = random.Random(45)  # noqa: S311 - draws that repeat
    _block, _node, config = claimed()
    classes = set()
    for number in range(NUMBER_OF_TRIALS):
        is_sound = number % 10 == 0
        messages = messages_of(config, rng)
        result = ran(messages if is_sound else disturbed(messages, rng), config, rng if not is_sound else _Always())
        paths = WorkPaths(home=tmp_path).trial("att_1", f"trl_{number}")
        write_whole(paths.result, result.model_dump_json())
        receipt = judged(record_of(paths))
        if is_sound:
            assert isinstance(receipt, Receipt)
            assert receipt.outcome is Outcome.MEASURED, receipt.message
            assert receipt.program is not None
            assert receipt.program.reported == dict(messages[-3]["values"])
            assert [step.loss for step in receipt.steps] == [loss for _index, loss in messages[-5]["losses"]]
        failure = receipt.failure_class if isinstance(receipt, Receipt) else receipt
        classes.add(failure)
        assert failure is None or not failure.rule.speaks_against_node
    arm, clock = {None, FailureClass.USER_ERROR, FailureClass.NUMERICS}, FailureClass.INVALID_MEASUREMENT
    assert classes == arm | {clock}, "the last one is a window by two clocks that disagree"


class _Always(random.Random):
    """A clock that stamps every message at its moment."""

    def random(self) -> float:
        return 0.0


SOUND = TrialResult.partial(failure_class=FailureClass.USER_ERROR, message="it failed").model_dump_json()


def deep_folders(path: Path) -> None:
    """Make folders so deep that their path is longer than the system allows, one of them closed."""
    path.mkdir()
    with contextlib.chdir(path):
        for _ in range(1_500):
            Path("aaaaaa").mkdir()
            os.chdir("aaaaaa")
        Path().chmod(0)


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


FILES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "empty": lambda path: path.write_bytes(b""),
    "noise": lambda path: path.write_bytes(random.Random(1).randbytes(5_000)),  # noqa: S311
    "cut": lambda path: path.write_text(SOUND[:-5]),
    "other json": lambda path: path.write_text('{"index": 0, "seconds": "x", "tokens": [], "loss": {}}\n'),
    "deep json": lambda path: path.write_text("[" * 200_000 + "]" * 200_000 + "\n"),
    "large number": lambda path: path.write_text('{"index": 1, "seconds": 1e-300, "tokens": ' + "9" * 4_000 + "}\n"),
    "not a number": lambda path: path.write_text('{"index": 1, "seconds": NaN, "tokens": 1, "loss": Infinity}\n'),
    "no number": lambda path: path.write_text('{"index": -7, "seconds": 0.0, "tokens": -1, "loss": 1e999}\n'),
    "surrogate": lambda path: path.write_text('{"facts": {"a": "\\ud800"}, "index": 0}\n'),
    "nul": lambda path: path.write_bytes(b'{"message": "\\u0000\0"}\n'),
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "loop": lambda path: path.symlink_to(path.name),
    "folder": lambda path: path.mkdir(),
    "deep folders": deep_folders,
    "pipe": os.mkfifo,
    "socket": bound_socket,
    "closed file": lambda path: (path.write_text(SOUND), path.chmod(0)),
}
"""What a program may leave at the place of a file that the worker reads."""


@pytest.mark.parametrize("what", FILES)
def test_files_that_a_program_leaves_raise_nowhere_and_blame_no_node(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # for short names of sockets
    paths = TrialPaths(folder=Path("trial"))
    paths.folder.mkdir()
    for path in (paths.log, paths.steps, paths.result, paths.receipt):
        FILES[what](path)
    output = BlockOutput()
    output.add("trl_1", paths, steps_total=6)
    assert len(output.chunks()) <= 1
    for progress in output.unsent_progress():
        json.loads(progress.model_dump_json(), parse_constant=pytest.fail)
        assert 0 <= progress.steps_done <= 6
    assert isinstance(read_steps(paths.steps), tuple)
    written = read_result(paths.result)
    assert written is None or written.failure_class in (None, FailureClass.USER_ERROR)
    for exit_code in (0, -9, failures.CANNOT_WRITE):
        receipt = judged(record_of(paths, exit_code=exit_code))
        failure = receipt.failure_class if isinstance(receipt, Receipt) else receipt
        assert failure is FailureClass.USER_ERROR or exit_code < 0, (exit_code, failure)
    paths.drop_output()
    for path in (paths.result, paths.receipt):
        paths.make_room(path)
        write_whole(path, "{}")
        assert path.read_text() == "{}"
    WorkPaths(home=tmp_path).clean(keep=0)


def test_folders_of_any_depth_are_removed(tmp_path: Path) -> None:
    deep_folders(tmp_path / "work")
    WorkPaths(home=tmp_path).clean(keep=0)
    assert list((tmp_path / "work").iterdir()) == []
