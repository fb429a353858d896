"""Commands of several processes: what their ranks become together, and that each disagreement is named."""

import itertools
import json
import math
import random
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.program_report import clocks_differ
from ablate.model.config import StepsConfig
from ablate.workers.commands import program_end
from ablate.workers.commands.ranks import ProgramMarks, rank_problem
from tests.programs import program_config, ran, write_program

LAUNCHER = """
import os, subprocess, sys, time
world = int(sys.argv[1])
ranks = [subprocess.Popen([sys.executable, "rank.py"], env={**os.environ, "RANK": str(i), "WORLD_SIZE": sys.argv[1]})
         for i in range(world)]
while any(one.poll() is None for one in ranks) and not any(one.poll() for one in ranks):
    time.sleep(0.01)
for one in ranks:
    one.terminate()
sys.exit(int(any(one.wait() for one in ranks)))
"""
"""As torchrun: it starts the ranks, and ends them all when one fails."""

RANK = """
import ablate, os, signal, sys, time
rank = int(os.environ["RANK"])
{before}
with ablate.trial(seed={seed}) as trial:
    for step in trial.steps():
        {inside}
        step.report(loss=0.5 + rank, tokens={tokens})
{after}
"""


DIED = r"rank {} of 3(?: and rank \d of 3)* died before the end"
"""Its launcher ends the others at once, and a busy machine sees all of these ends together."""


def run(
    tmp_path: Path,
    world: int,
    *,
    before: str = "",
    seed: str = "7",
    inside: str = "pass",
    tokens: str = "10",
    after: str = "",
) -> Any:
    folder = write_program(tmp_path / "code", LAUNCHER)
    source = RANK.format(before=before, seed=seed, inside=inside, tokens=tokens, after=after)
    folder.joinpath("rank.py").write_text(source, encoding="utf-8")
    config = program_config(folder, command=("python", "train.py", str(world)))
    return ran(config, tmp_path / "home")


def test_the_tokens_of_each_rank_are_kept_and_a_rank_that_reports_half_of_them_shows(tmp_path: Path) -> None:
    result = run(tmp_path, 3, tokens="10 if rank else 5", inside="time.sleep(0.002 * rank)")
    assert result.failure_class is None, result.message
    assert result.program.ranks == 3
    assert result.program.rank_tokens == (15, 30, 30)
    assert {step.tokens for step in result.program_steps} == {25}
    assert [step.loss for step in result.program_steps] == [pytest.approx((5 * 0.5 + 10 * 1.5 + 10 * 2.5) / 25)] * 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"before": "if rank == 1: sys.exit(0)"}, "rank 1 of 3 marked no steps"),
        ({"before": "if rank == 2: os.environ['RANK'] = '5'"}, "rank 2 of 3 marked no steps"),
        ({"before": "os.environ['WORLD_SIZE'] = '2'"}, "rank 2 marked steps, but the program has 2 ranks"),
        ({"before": "if rank == 1: os.environ['WORLD_SIZE'] = '4'"}, "rank 0 has 3, rank 1 has 4, rank 2 has 3"),
        ({"before": "os.environ['RANK'] = '0'"}, "two processes report as rank 0: set RANK and WORLD_SIZE"),
        ({"inside": "if (rank, step.index) == (1, 3): break"}, "rank 1 marked 3 of 5 steps"),
        ({"after": "    if rank == 2: os._exit(0)"}, DIED.format(2)),
        ({"seed": "7 + rank"}, "rank 1 trained with seed 8; the block has seed 7"),
        ({"before": "ablate._IMPLEMENTATIONS = {'cpython': f'x{rank}'}"}, "about their interpreter: rank 0 has x0 3."),
        ({"before": "import ablate_imports as m; m.packages = lambda: {'t': str(rank)}"}, "about their packages"),
        ({"inside": "if (rank, step.index) == (1, 2): raise ValueError('odd')"}, "rank 1 of 3 raised builtins.Val"),
        ({"inside": "if (rank, step.index) == (1, 2): os._exit(3)"}, DIED.format(1)),
        ({"inside": "if (rank, step.index) == (2, 2): os.kill(os.getpid(), 9)"}, DIED.format(2)),
    ],
)  # fmt: skip
def test_ranks_that_disagree_or_are_missing_are_named(tmp_path: Path, changes: dict[str, str], words: str) -> None:
    result = run(tmp_path, 3, **changes)
    assert result.failure_class is FailureClass.USER_ERROR
    assert re.search(words, str(result.message)), result.message


def messages_of(rank: int, *, world: int, pace_s: float) -> list[tuple[dict[str, Any], float]]:
    """Return the messages of one rank that marks five steps, each with the moment at which it arrives."""
    at = 100.0 + rank * 0.001
    ends = [at + pace_s * (index + 1) for index in range(5)]
    rows: list[tuple[dict[str, Any], float]] = [
        ({"event": "began", "at": at, "python": "3.12", "implementation": "CPython", "world": world}, at),
        ({"event": "window began", "at": ends[1]}, ends[1]),
        ({"event": "window ended", "at": ends[4]}, ends[4]),
    ]
    rows += [({"event": "steps", "steps": [[i, ends[i], 0, None]]}, ends[i]) for i in range(5)]
    rows.append(({"event": "losses", "losses": [[i, float(rank)] for i in range(5)]}, ends[4]))
    rows.append(({"event": "tokens", "tokens": [[i, 10] for i in range(5)]}, ends[4]))
    packages = {"torch": "2"}
    ended = {"event": "ended", "at": ends[4], "seed": 7, "whole": True, "memory": [rank, 2 * rank]}
    rows.append(({**ended, "packages": packages}, ends[4]))
    return [({"rank": rank, **values}, seen) for values, seen in rows]


def test_any_interleaving_of_the_messages_of_any_ranks_gives_the_same_measurement() -> None:
    """Each rank's messages keep their order, as datagrams of one socket do."""
    chance = random.Random(20261126)  # noqa: S311
    for _ in range(150):
        world = chance.randint(1, 8)
        lost = chance.choice([None, None, chance.randrange(world)]) if world > 1 else None
        queues = [messages_of(rank, world=world, pace_s=0.01 * (rank + 1)) for rank in range(world) if rank != lost]
        marks, config = ProgramMarks(program_config(None)), program_config(None)
        while any(queues):
            values, seen = chance.choice([queue for queue in queues if queue]).pop(0)
            assert marks.take(json.dumps(values).encode(), seen) is not None, marks.wrong
        problem = rank_problem(marks.loops, config)
        assert (problem is None) == (lost is None)
        if lost is not None:
            assert f"rank {lost} of {world}" in str(problem)
            continue
        slowest = max(marks.loops.values(), key=lambda rank: rank.window_s)
        assert slowest.window_s == pytest.approx(0.03 * world)
        assert max(rank.memory or (0, 0) for rank in marks.loops.values()) == (world - 1, 2 * (world - 1))


def test_a_missing_message_of_any_rank_is_never_a_whole_measurement() -> None:
    for world, number in itertools.product((2, 3), range(2)):
        for left_out in range(11):
            marks = ProgramMarks(program_config(None))
            for rank in range(world):
                rows = messages_of(rank, world=world, pace_s=0.01)
                for index, (values, seen) in enumerate(rows):
                    if (rank, index) != (number, left_out):
                        marks.take(json.dumps(values).encode(), seen)
            event = messages_of(number, world=world, pace_s=0.01)[left_out][0]["event"]
            whole = rank_problem(marks.loops, program_config(None)) is None
            assert whole == (event in {"losses", "tokens"}), event


def test_a_rank_whose_clock_runs_slow_does_not_hide_that_it_is_the_slowest(tmp_path: Path) -> None:
    slow = "if rank == 1: ablate._now = lambda: time.monotonic() / 4"
    result = run(tmp_path, 2, before=slow, inside="time.sleep(0.3 * rank)")
    assert result.failure_class is None, result.message
    assert 3 * result.program.window_s < result.program.window_seen_s
    assert clocks_differ(result.program.window_s, result.program.window_seen_s)


WAITS = "if (rank, step.index) == (1, 2): {fault}\n        if rank != 1 and step.index == 3: time.sleep(600)"
"""One rank fails, and the others wait for it as in a collective."""


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise RuntimeError('NCCL error')", "rank 1 of 3 raised builtins.RuntimeError: NCCL error"),
        ("sys.exit(7)", "rank 1 of 3 ended with exit code 7"),
        ("os._exit(0)", DIED.format(1)),
        ("os.kill(os.getpid(), 9)", DIED.format(1)),
        ("os.abort()", DIED.format(1)),
    ],
)
def test_ranks_that_wait_for_a_lost_one_are_ended_and_the_lost_one_is_named(
    tmp_path: Path, fault: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their launcher waits for the first one only."""
    monkeypatch.setattr(program_end, "_LOST_PATIENCE_S", 0.5)
    folder = write_program(tmp_path / "code", LAUNCHER.partition("while any")[0] + "sys.exit(ranks[0].wait())")
    source = RANK.format(before="", seed="7", inside=WAITS.format(fault=fault), tokens="10", after="")
    folder.joinpath("rank.py").write_text(source, encoding="utf-8")
    result = ran(program_config(folder, command=("python", "train.py", "3")), tmp_path / "home")
    assert result.failure_class is FailureClass.USER_ERROR
    assert re.search(words, str(result.message)), result.message
    assert "was ended" in str(result.message)


ELASTIC = """
import os, subprocess, sys
e = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_RUN_ID": "a"}
for count in range(3):
    code = subprocess.call([sys.executable, "rank.py"], env={**e, "TORCHELASTIC_RESTART_COUNT": str(count)})
    if not code:
        break
sys.exit(code)
"""


@pytest.mark.parametrize("fault", ["os._exit(1)", "raise ValueError('lost a peer')", "os.kill(os.getpid(), 9)"])
@pytest.mark.parametrize("failing", [1, 2, 3])
def test_the_last_round_of_an_elastic_launcher_counts(
    tmp_path: Path, fault: str, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_end, "_LOST_PATIENCE_S", 0.0)
    folder = write_program(tmp_path / "code", ELASTIC)
    inside = f"if step.index == 2 and int(os.environ['TORCHELASTIC_RESTART_COUNT']) < {failing}: {fault}"
    report = "    trial.report(round=int(os.environ['TORCHELASTIC_RESTART_COUNT']))"
    source = RANK.format(before="", seed="7", inside=inside, tokens="10", after=report)
    folder.joinpath("rank.py").write_text(source, encoding="utf-8")
    result = ran(program_config(folder, command=("python", "train.py")), tmp_path / "home")
    assert (result.failure_class is None) == (failing < 3), result.message
    if failing < 3:
        assert result.program is not None
        assert result.program.reported == {"round": float(failing)}
        assert len(result.program_steps) == 5


def test_any_interleaving_of_rounds_gives_the_last_round_alone() -> None:
    """Late messages of an earlier round, cut off anywhere, change nothing."""
    chance = random.Random(20261128)  # noqa: S311
    for _ in range(150):
        world, rounds = chance.randint(1, 4), chance.randint(2, 4)
        queues = []
        for number in range(rounds):
            for rank in range(world):
                rows = messages_of(rank, world=world, pace_s=0.01 * (number + 1))
                kept = rows if number == rounds - 1 else rows[: chance.randrange(len(rows))]
                place = {"run": "a", "round": number, "restarts": rounds - 1 - number}
                queues.append([({**values, **place}, seen) for values, seen in kept])
        marks, config = ProgramMarks(program_config(None)), program_config(None)
        while any(queues):
            values, seen = chance.choice([queue for queue in queues if queue]).pop(0)
            marks.take(json.dumps(values).encode(), seen)
            assert marks.wrong is None
        assert rank_problem(marks.loops, config) is None
        assert {round(rank.window_s, 6) for rank in marks.loops.values()} == {0.03 * rounds}
        assert marks.restarts == 0


def test_two_launchers_after_each_other_are_two_loops_and_no_rounds() -> None:
    marks = ProgramMarks(program_config(None))
    for run, process in (("a", 1), ("b", 2)):
        for values, seen in messages_of(0, world=1, pace_s=0.01):
            message = {**values, "run": run, "round": 1 if run == "a" else 0, "process": process}
            marks.take(json.dumps(message).encode(), seen)
    assert "two processes report as rank 0" in str(marks.wrong)


def sliced_marks(changes: Mapping[str, Any] = MappingProxyType({}), *, slices: int, size: int) -> ProgramMarks:
    """Return the marks of a program that took its turns, in which one thing is changed."""
    steps = StepsConfig(warmup=1, warmup_s=0.0, timed=slices * size, slice=size, val_rows=0)
    marks, now = ProgramMarks(program_config(None, steps=steps)), itertools.count(1.0)
    own: dict[str, Any] = {"rank": 0, "python": "3", "implementation": "CPython"}

    def send(event: str, **values: Any) -> None:
        if changes.get("leave out") != (event, values.pop("part", None)):
            marks.take(json.dumps({**own, "event": event, **values}).encode(), values.get("at", 0.0))

    send("began", at=next(now), world=changes.get("world", 1))
    ended = [[index, next(now), 10, None] for index in range(2)]
    for part in range(slices):
        send("turn", part=part)
        if changes.get("no answer") != part:
            marks.ranks[0].turn_began = next(now)
        late = 2.5 if changes.get("early") == part else 0.0  # before the turn, and after the step before
        send("window began", at=next(now) - late, part=part)
        ended += [[2 + part * size + index, next(now), 10, None] for index in range(size)]
        send("window ended", at=ended[-1][1] + (0.5 if changes.get("late") == part else 0.0), part=part)
    send("turn", part=slices)
    for part in changes.get("more", ()):
        send(part, **({"at": next(now)} if part != "turn" else {}))
    send("steps", steps=ended)
    send("ended", at=next(now), seed=7, whole=True, packages={}, memory=None)
    return marks


@pytest.mark.parametrize(("slices", "size"), [(2, 1), (2, 3), (6, 1), (4, 5)])
def test_slices_of_a_program_are_whole_only_with_all_their_turns_and_ends_in_order(slices: int, size: int) -> None:
    def problem(**changes: Any) -> str | None:
        marks = sliced_marks(
            {name.replace("_", " "): value for name, value in changes.items()}, slices=slices, size=size
        )
        whole = marks.wrong is None and marks.ranks[0].is_whole(marks._config.steps)
        found = marks.wrong or rank_problem(marks.loops, marks._config)
        assert whole == (found is None), found
        return found

    marks = sliced_marks(slices=slices, size=size)
    assert problem() is None
    rank, steps = marks.ranks[0], marks._config.steps
    assert rank.window_s == rank.window_seen_s == slices * size
    assert math.fsum(rank.step_s(index, steps) for index in range(2, steps.total)) == rank.window_s
    for part in range(slices):
        assert f"slice {part + 1} began before the turn" in str(problem(leave_out=("turn", part)))
        assert f"slice {part + 1} began before the turn" in str(problem(early=part))
        assert f"slice {part + 1} began before the turn" in str(problem(no_answer=part))
        assert f"slice {part + 1} of {slices}'s end at" in str(problem(late=part))
        assert "marked no window" in str(problem(leave_out=("window ended", part)))
        assert problem(leave_out=("window began", part)) is not None
    assert f"a wait for a turn after {slices + 1}" in str(problem(more=["turn"]))
    for edge in ("window began", "window ended"):
        assert f"{edge} more than {slices} times" in str(problem(more=[edge]))
    assert "trains with 2 ranks, which cannot take turns" in str(problem(world=2))


def test_a_program_without_slices_waits_before_its_window_and_after_it() -> None:
    marks = ProgramMarks(program_config(None))
    began = {"event": "began", "rank": 0, "at": 1.0, "world": 1, "python": "3", "implementation": "CPython"}
    assert marks.take(json.dumps(began).encode(), 1.0) is not None
    for _ in range(2):
        assert marks.take(json.dumps({"event": "turn", "rank": 0}).encode(), 2.0) is not None
    assert marks.take(json.dumps({"event": "turn", "rank": 0}).encode(), 2.0) is None
    assert "a wait for a turn after 2" in str(marks.wrong)
