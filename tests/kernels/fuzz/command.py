"""A run of the fuzz from its arguments to its summary, whichever lane answers."""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from tests.kernels.fuzz import draws, results
from tests.kernels.fuzz.draws import DrawLimits
from tests.kernels.fuzz.outcomes import FuzzOutcome
from tests.kernels.fuzz.problems import ScanProblem, parsed
from tests.kernels.fuzz.results import FuzzSetting, OutcomeStore
from tests.kernels.fuzz.workers import Answer, Compiled, FuzzPool

OFTEN_S = 10.0
"""How often the summary is written."""


def parser(program: str, about: str | None, *, count: int, out: Path) -> argparse.ArgumentParser:
    """Return the parser of a run's arguments."""
    made = argparse.ArgumentParser(prog=program, description=(about or "").partition("\n")[0])
    made.add_argument("--count", type=int, default=count, help="problems that run; refused ones come on top")
    made.add_argument("--seed", type=int, default=0, help="of the problems")
    made.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time, summary included")
    made.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    made.add_argument("--out", type=Path, default=out, help="folder; goes on with what is there")
    made.add_argument("--only", type=parsed, metavar="LINE", help="run this problem alone, in this process")
    return made


def run(arguments: argparse.Namespace, answer: Answer, limits: DrawLimits, device: str) -> int:
    """Run the problems, storing what becomes of each; print the summary and return 1 when one is not right."""
    begin = written = time.monotonic()
    store, new, kept = OutcomeStore(arguments.out), 0, 0
    setting = _setting(device)

    def write() -> str:
        complete = _ran(store) >= arguments.count
        seconds = time.monotonic() - begin
        return store.write(results.summarised(store.outcomes, setting, seconds, complete=complete, kernels=(new, kept)))

    with FuzzPool(answer, arguments.jobs) as pool:
        for said in pool.outcomes(_wanted(arguments, limits, store, pool)):
            if isinstance(said, Compiled):
                new, kept = new + said.new, kept + said.kept
            elif said is not None:
                store.add(said)
                _tell(said)
            if time.monotonic() - begin > arguments.seconds:
                break
            if time.monotonic() - written > OFTEN_S:
                write()
                written = time.monotonic()
    _confirm(answer, store, begin + arguments.seconds)
    sys.stdout.write(write())
    return int(any(outcome.ending not in results.GOOD for outcome in store.outcomes))


def _tell(outcome: FuzzOutcome) -> None:
    if outcome.ending not in results.GOOD:
        sys.stderr.write(f"{results.told(outcome)}\n  {results.reproduction(outcome.problem)}\n")


def _confirm(answer: Answer, store: OutcomeStore, until: float) -> None:
    """Run what is not right once more, one problem after another, each in a process of its own."""
    for outcome in store.outcomes:
        if outcome.ending in results.GOOD or outcome.alone is not None:
            continue
        with FuzzPool(answer, 1) as pool:
            for said in pool.outcomes(iter([(outcome.problem,)])):
                if isinstance(said, FuzzOutcome):
                    store.add(outcome.model_copy(update={"alone": said.ending}))
                if time.monotonic() > until:
                    return


def _wanted(
    arguments: argparse.Namespace, limits: DrawLimits, store: OutcomeStore, pool: FuzzPool
) -> Iterator[tuple[ScanProblem, ...]]:
    """Yield the sets of the seed whose outcomes are not stored, until enough problems ran; an empty one: wait.

    Those that are pending may yet be refused.
    """
    known = {outcome.problem.line: outcome.ending for outcome in store.outcomes}
    drawn = draws.sets(arguments.seed, limits)
    while _ran(store) < arguments.count:
        if _ran(store) + pool.pending >= arguments.count:
            yield ()
            continue
        problems = next(drawn)
        missing = tuple(problem for problem in problems if problem.line not in known)
        if missing and known.get(problems[0].line) != "refused":
            yield missing


def _ran(store: OutcomeStore) -> int:
    return sum(outcome.ending != "refused" for outcome in store.outcomes)


def _setting(device: str) -> FuzzSetting:
    return FuzzSetting(
        command=" ".join(["python -m tests.kernels.fuzz", *sys.argv[1:]]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        device=device,
        versions={name: metadata.version(name) for name in ("torch", "tilelang", "apache-tvm-ffi")},
    )
