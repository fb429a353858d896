"""Commands of several processes: what their ranks become together, and that each disagreement is named."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from experiments.outcomes import FailureClass
from experiments.records.program_report import clocks_differ
from tests.programs import program_config, ran, write_program
from workers.processes.program import ProgramMarks
from workers.processes.ranks import rank_problem

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
        ({"before": "os.environ['RANK'] = '0'"}, "two training loops of one rank"),
        ({"inside": "if (rank, step.index) == (1, 3): break"}, "rank 1 marked 3 of 5 steps"),
        ({"after": "    if rank == 2: os._exit(0)"}, "rank 2 marked 5 of 5 steps, or left the trial"),
        ({"seed": "7 + rank"}, "rank 1 trained with seed 8; the block has seed 7"),
        ({"before": "ablate.platform = type('p', (), {'python_version': lambda: str(rank),"
                    " 'python_implementation': lambda: 'x'})"}, "disagree about their interpreter: rank 0 has x 0"),
        ({"before": "ablate._packages = lambda: {'torch': str(rank)}"}, "disagree about their packages"),
        ({"inside": "if (rank, step.index) == (1, 2): raise ValueError('odd')"}, "ValueError: odd"),
        ({"inside": "if (rank, step.index) == (1, 2): os._exit(3)"}, "exit code 1"),
        ({"inside": "if (rank, step.index) == (2, 2): os.kill(os.getpid(), 9)"}, "exit code 1"),
    ],
)  # fmt: skip
def test_ranks_that_disagree_or_are_missing_are_named(tmp_path: Path, changes: dict[str, str], words: str) -> None:
    result = run(tmp_path, 3, **changes)
    assert result.failure_class is FailureClass.USER_ERROR
    assert words in str(result.message)


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
    result = run(tmp_path, 2, before=slow, inside="time.sleep(0.01 + 0.02 * rank)")
    assert result.failure_class is None, result.message
    assert result.program.window_s < 0.04 < 0.085 < result.program.window_seen_s
    assert clocks_differ(result.program.window_s, result.program.window_seen_s)
