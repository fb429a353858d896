"""The processes of a trial on several devices: one fails, and the trial ends with its failure and nothing left."""

import errno
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ablate.experiments.digest import SOURCE_ROOT
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.system.isolation import Isolation
from ablate.experiments.system.kernel_limits import enclose, keep_apart, landlock_version
from ablate.experiments.system.processes import children_of, is_alive
from ablate.workers.built_in.rank_group import result_path, run_ranks
from ablate.workers.isolation.reach import system_folders
from ablate.workers.trials.result import TrialResult, read_result
from tests.waiting import LIMIT_S, until

WORLD = 3
_fork = multiprocessing.get_context("fork")


def failure(rank: int) -> TrialResult:
    return TrialResult.partial(failure_class=FailureClass.OOM, message=f"no memory on {rank}")


def ends_well(rank: int) -> TrialResult:
    return TrialResult.partial(data_digest=f"sha256:{rank}")


def second_fails(rank: int) -> TrialResult:
    if rank == 1:
        return failure(rank)
    time.sleep(600)  # as in a collective that waits for rank 1
    return ends_well(rank)


def dies_of(number: signal.Signals) -> Callable[[int], TrialResult]:
    def work(rank: int) -> TrialResult:
        if rank == 1:
            os.kill(os.getpid(), number)
        time.sleep(600)
        return ends_well(rank)

    return work


def exits(rank: int) -> TrialResult:
    if rank == 1:
        os._exit(75)
    time.sleep(600)
    return ends_well(rank)


def raises(rank: int) -> TrialResult:
    if rank == 1:
        raise KeyboardInterrupt
    time.sleep(600)
    return ends_well(rank)


def outcome(work: Callable[[int], TrialResult], folder: Path) -> tuple[int, TrialResult | None]:
    """Run the ranks below a process of their own; return its exit code and the result. No rank is left."""

    def first_process() -> None:
        (folder / "result.json").write_text(run_ranks(WORLD, work, folder).model_dump_json())
        (folder / "left").write_text(str([pid for pid in children_of(os.getpid()) if is_alive(pid)]))

    process = _fork.Process(target=first_process)
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode is not None, "it hangs"
    left = folder / "left"
    assert not left.exists() or left.read_text() == "[]"
    return process.exitcode, read_result(folder / "result.json")


def test_the_result_of_ranks_that_end_well_is_that_of_the_first(tmp_path: Path) -> None:
    code, result = outcome(ends_well, tmp_path)
    assert (code, result) == (0, ends_well(0))
    assert [read_result(result_path(tmp_path, rank)) for rank in range(WORLD)] == list(map(ends_well, range(WORLD)))


def test_the_rank_that_failed_says_why_the_trial_failed(tmp_path: Path) -> None:
    _code, result = outcome(second_fails, tmp_path)
    assert result is not None
    assert (result.failure_class, result.message) == (FailureClass.OOM, "rank 1 of 3: no memory on 1")


def test_the_rank_that_failed_first_says_it_where_others_notice_a_closed_connection(tmp_path: Path) -> None:
    def work(rank: int) -> TrialResult:
        while rank != 2 and not result_path(tmp_path, 2).exists():
            time.sleep(0.01)
        time.sleep(0.01)  # the clock of files has a resolution of some milliseconds
        return failure(rank)

    _code, result = outcome(work, tmp_path)
    assert result is not None
    assert (result.failure_class, result.message) == (FailureClass.OOM, "rank 2 of 3: no memory on 2")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_rank_that_died_of_a_signal_ends_the_trial_by_the_same(
    number: signal.Signals, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, result = outcome(dies_of(number), tmp_path)
    assert (code, result) == (-number, None)
    assert f"rank 1 of 3 died of {number.name}" in capfd.readouterr().out


@pytest.mark.parametrize(("work", "expected"), [(exits, 75), (raises, 1)])
def test_a_rank_that_ended_without_a_result_ends_the_trial_with_its_code(
    work: Callable[[int], TrialResult], expected: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, result = outcome(work, tmp_path)
    assert (code, result) == (expected, None)
    assert f"rank 1 of 3 ended with exit code {expected} without a result" in capfd.readouterr().out


def test_ranks_end_with_the_first_process(tmp_path: Path) -> None:
    def waits(rank: int) -> TrialResult:
        (tmp_path / f"pid-{rank}").write_text(str(os.getpid()))
        time.sleep(600)
        return ends_well(rank)

    process = _fork.Process(target=run_ranks, args=(WORLD, waits, tmp_path))
    process.start()
    pids = [tmp_path / f"pid-{rank}" for rank in range(WORLD)]
    until(lambda: all(path.exists() and path.read_text() for path in pids))
    process.kill()
    process.join()
    until(lambda: not any(is_alive(int(path.read_text())) for path in pids), what="the end of every rank")


@pytest.mark.skipif(landlock_version() < 6, reason="this kernel's Landlock keeps no sockets apart")
def test_isolated_ranks_reach_each_other_and_nobody_else(tmp_path: Path) -> None:
    """NCCL's ranks meet at abstract sockets, and a rank may reset the peak of its own memory."""
    readable = (*system_folders(), Path(sys.prefix), Path(sys.base_prefix), SOURCE_ROOT)
    isolation = Isolation(readable=readable, writable=(tmp_path,), sockets=True)
    name, outer = f"\0ablate-rank-{os.getpid()}", os.getpid()

    def refused(what: Callable[[], object]) -> bool:
        try:
            what()
        except PermissionError:
            return True
        return False

    def work(rank: int) -> TrialResult:
        isolation.enter(alone=False)
        Path("/proc/self/clear_refs").write_text("5")
        with socket.socket(socket.AF_UNIX) as link:
            if rank == 0:
                link.bind(name)
                link.listen()
                link.accept()[0].close()
                return ends_well(0)
            until(lambda: link.connect_ex(name) != errno.ECONNREFUSED)
            link.getpeername()  # raises unless it is connected
        with socket.socket(socket.AF_UNIX) as other:
            answers = [refused(lambda: other.connect(f"{name}-outside")), refused(lambda: os.kill(outer, 0))]
        return TrialResult.partial(message=str(answers))

    def first_process() -> None:
        enclose()
        run_ranks(2, work, tmp_path)

    with socket.socket(socket.AF_UNIX) as outside:
        outside.bind(f"{name}-outside")
        outside.listen()
        process = _fork.Process(target=first_process)
        process.start()
        process.join(LIMIT_S)
    assert process.exitcode == 0
    result = read_result(result_path(tmp_path, 1))
    assert result is not None
    assert result.message == "[True, True]"


@pytest.mark.parametrize("limit", [enclose, keep_apart])
def test_an_enclosed_process_moves_and_links_files_between_folders(tmp_path: Path, limit: Callable[[], None]) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    (tmp_path / "from" / "file").write_text("text")

    def process() -> None:
        limit()
        (tmp_path / "from" / "file").rename(tmp_path / "to" / "moved")
        (tmp_path / "from" / "link").hardlink_to(tmp_path / "to" / "moved")

    enclosed = _fork.Process(target=process)
    enclosed.start()
    enclosed.join(LIMIT_S)
    assert enclosed.exitcode == 0
    assert (tmp_path / "from" / "link").read_text() == "text"
