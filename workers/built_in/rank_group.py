"""The processes of a built-in trial on several devices: one for each rank, forked by the trial's first process.

The first process computes nothing: it waits for the ranks, and ends all of them when one fails. Torch is imported
before the fork, and no device is touched. Each rank writes a result file. The trial's result is that of rank 0, or that
of the rank that failed first: the others then fail, too, because the connection is closed, or wait for it for ever.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ablate.experiments.documents import write_whole
from ablate.experiments.system.processes import die_with_parent
from ablate.workers.trials.failures import CANNOT_WRITE, signal_name
from ablate.workers.trials.result import TrialResult, read_result

RankWork = Callable[[int], TrialResult]
"""Rank -> its result. Exceptions are the caller's to turn into a result."""


def run_ranks(world: int, work: RankWork, folder: Path) -> TrialResult:
    """Run `work` for each rank in a process of its own; return rank 0's result, or that of the rank that failed first.

    Where a rank died of a signal, or without a result, this process ends in the same way, so that the worker classifies
    the trial as if it had one process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    leader, ranks = os.getpid(), dict[int, int]()
    try:
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                _be_rank(rank, work, folder, leader)
            ranks[pid] = rank
        return _wait(ranks, world, folder)
    finally:
        _end(ranks)


def result_path(folder: Path, rank: int) -> Path:
    """Return the result file of a rank."""
    return folder / f"rank-{rank}.json"


def _be_rank(rank: int, work: RankWork, folder: Path, leader: int) -> None:
    """Write the result of `rank` and exit."""
    code = 0
    try:
        die_with_parent(parent=leader)
        write_whole(result_path(folder, rank), work(rank).model_dump_json())
    except OSError:
        code = CANNOT_WRITE
    except BaseException:  # nothing of the parent's code may run in this process
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(ranks: dict[int, int], world: int, folder: Path) -> TrialResult:
    """Wait for all ranks, or for the first that fails; removes from `ranks` those that have ended."""
    results: dict[int, TrialResult] = {}
    while ranks:
        pid, status = os.waitpid(-1, 0)
        if pid not in ranks:  # an orphan of a compiler, which this process has adopted
            continue
        rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
        result = read_result(result_path(folder, rank)) if code == 0 else None
        if result is None:
            _end_like(rank, world, code, ranks)
        elif result.failure_class is not None:
            return _first_failure({**results, rank: result}, ranks, world, folder)
        else:
            results[rank] = result
    return results[0]


def _first_failure(results: dict[int, TrialResult], ranks: dict[int, int], world: int, folder: Path) -> TrialResult:
    """Return the result of the rank that failed first, among those that have written one and those that were killed."""
    for pid, rank in list(ranks.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del ranks[pid]
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                _end_like(rank, world, code, ranks)
        if (result := read_result(result_path(folder, rank))) is not None:
            results[rank] = result
    failed = [rank for rank, result in results.items() if result.failure_class is not None]
    first = min(failed, key=lambda rank: result_path(folder, rank).stat().st_mtime_ns)
    message = f"rank {first} of {world}: {results[first].message}"
    return results[first].model_copy(update={"message": message})


def _end_like(rank: int, world: int, code: int, ranks: dict[int, int]) -> None:
    """End this process as a rank has ended, which left no result."""
    _end(ranks)
    how = f"died of {signal_name(-code)}" if code < 0 else f"ended with exit code {code} without a result"
    sys.stdout.write(f"rank {rank} of {world} {how}\n")
    sys.stdout.flush()
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code or 1)


def _end(ranks: dict[int, int]) -> None:
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in ranks:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
    ranks.clear()
