"""A run of the fuzz from its arguments to its summary, for any lane."""

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

SUMMARY_S = 10.0
"""Seconds between updates of the summary."""


def parser(program: str, about: str | None, *, count: int, out: Path) -> argparse.ArgumentParser:
    """Return the parser of a run's arguments."""
    arguments = argparse.ArgumentParser(prog=program, description=(about or "").partition("\n")[0])
    arguments.add_argument("--count", type=int, default=count, help="problems to run, without refused ones")
    arguments.add_argument("--seed", type=int, default=0, help="seed of the problems")
    arguments.add_argument("--seconds", type=float, default=float("inf"), help="time limit, including the summary")
    arguments.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    arguments.add_argument("--out", type=Path, default=out, help="folder; continues with existing results")
    arguments.add_argument("--only", type=parsed, metavar="LINE", help="run only this problem, in this process")
    return arguments


def run(arguments: argparse.Namespace, answer: Answer, limits: DrawLimits, device: str) -> int:
    """Run the problems and store their outcomes; print the summary and return 1 if one is not right."""
    begin = written = time.monotonic()
    store, new, kept = OutcomeStore(arguments.out), 0, 0
    setting = _setting(device)

    def write() -> str:
        complete = _ran(store) >= arguments.count
        seconds = time.monotonic() - begin
        return store.write(results.summarised(store.outcomes, setting, seconds, complete=complete, kernels=(new, kept)))

    with FuzzPool(answer, arguments.jobs) as pool:
        for event in pool.outcomes(_requested(arguments, limits, store, pool)):
            if isinstance(event, Compiled):
                new, kept = new + event.new, kept + event.kept
            elif event is not None:
                store.add(event)
                _print_fault(event)
            if time.monotonic() - begin > arguments.seconds:
                break
            if time.monotonic() - written > SUMMARY_S:
                write()
                written = time.monotonic()
    _confirm(answer, store, begin + arguments.seconds)
    sys.stdout.write(write())
    return int(any(outcome.ending not in results.GOOD for outcome in store.outcomes))


def _print_fault(outcome: FuzzOutcome) -> None:
    if outcome.ending not in results.GOOD:
        sys.stderr.write(f"{results.described(outcome)}\n  {results.reproduction(outcome.problem)}\n")


def _confirm(answer: Answer, store: OutcomeStore, until: float) -> None:
    """Run problems that are not right again, one by one, each in a process of its own."""
    for outcome in store.outcomes:
        if outcome.ending in results.GOOD or outcome.alone is not None:
            continue
        with FuzzPool(answer, 1) as pool:
            for event in pool.outcomes(iter([(outcome.problem,)])):
                if isinstance(event, FuzzOutcome):
                    store.add(outcome.model_copy(update={"alone": event.ending}))
                if time.monotonic() > until:
                    return


def _requested(
    arguments: argparse.Namespace, limits: DrawLimits, store: OutcomeStore, pool: FuzzPool
) -> Iterator[tuple[ScanProblem, ...]]:
    """Yield the sets of the seed without stored outcomes until enough problems ran. An empty set means: wait.

    Pending problems may still be refused.
    """
    endings = {outcome.problem.line: outcome.ending for outcome in store.outcomes}
    drawn = draws.sets(arguments.seed, limits)
    while _ran(store) < arguments.count:
        if _ran(store) + pool.pending >= arguments.count:
            yield ()
            continue
        problems = next(drawn)
        missing = tuple(problem for problem in problems if problem.line not in endings)
        if missing and endings.get(problems[0].line) != "refused":
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
