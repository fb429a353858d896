"""Every way to end a trial also ends its children."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ablate.experiments.system.processes import Mark
from ablate.workers.isolation.environment import trial_mark
from ablate.workers.lease import Lease, StopReason, boot_time_s
from ablate.workers.processes.guardian import Guardian, end_trial
from ablate.workers.processes.runner import TrialRunner
from ablate.workers.processes.wake_event import WakeEvent
from tests.architecture.pages import ROOT
from tests.clock import Clock
from tests.integration.worker_family import order, server
from tests.integration.worker_service import is_gone
from tests.waiting import LIMIT_S, until


def _family(folder: Path) -> list[int]:
    text = until(lambda: (folder / "result.json").exists() and (folder / "result.json").read_text())
    return [int(pid) for pid in text.split()]


@pytest.fixture
def runner() -> Iterator[tuple[TrialRunner, WakeEvent]]:
    wake_event = WakeEvent()
    with Guardian() as guardian:
        yield TrialRunner(server(), guardian, wake_event, grace_s=0.2, preempted=lambda: False), wake_event


def _once_started(folder: Path, wake_event: WakeEvent, act: Callable[[], None]) -> threading.Thread:
    """Act and wake the runner when the family of its trial runs, in a thread."""

    def wait_and_act() -> None:
        _family(folder)
        act()
        wake_event.set()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("ablate.workers.processes.runner.time", clock)
    return clock


@pytest.mark.parametrize("reason", [StopReason.CANCELLED, StopReason.FENCED, StopReason.TIMEOUT])
def test_run_stopped_kills_the_whole_family(
    tmp_path: Path, runner: tuple[TrialRunner, WakeEvent], clock: Clock, reason: StopReason
) -> None:
    lease = Lease(300.0, sent_at=boot_time_s())

    def interfere() -> None:
        if reason is StopReason.CANCELLED:
            lease.cancel()
        elif reason is StopReason.FENCED:
            lease.revoke()
        else:
            clock.ahead_s = 1000.0

    thread = _once_started(tmp_path, runner[1], interfere)
    ending = runner[0].run(order(tmp_path), lease, timeout_s=600.0)
    thread.join()
    assert ending.stopped is reason
    assert ending.survivors == ()
    assert all(map(is_gone, _family(tmp_path)))


@pytest.mark.parametrize("late_s", [0.0, 0.001, 0.003, 0.01, 0.03])
def test_run_that_must_stop_at_its_start_does(
    tmp_path: Path, runner: tuple[TrialRunner, WakeEvent], late_s: float
) -> None:
    """The trial may not have a group of its own yet: none of these runs may last as long as its family would."""
    lease = Lease(300.0, sent_at=boot_time_s())
    runner[0].run(order(tmp_path / "warm", leaves=True), lease, timeout_s=60.0)  # the fork server runs from here on
    lease = Lease(late_s, sent_at=boot_time_s())
    ending = runner[0].run(order(tmp_path / "early"), lease, timeout_s=600.0)
    assert (ending.stopped, ending.exit_code) == (StopReason.FENCED, -signal.SIGKILL)
    assert ending.survivors == ()
    assert trial_mark("trl_early").members() == []


def test_run_that_ends_by_itself_leaves_no_children(tmp_path: Path, runner: tuple[TrialRunner, WakeEvent]) -> None:
    ending = runner[0].run(order(tmp_path, leaves=True), Lease(300.0, sent_at=boot_time_s()), timeout_s=60.0)
    assert (ending.stopped, ending.exit_code) == (None, 0)
    assert all(map(is_gone, _family(tmp_path)))


@pytest.mark.parametrize("leaves", [True, False])
def test_a_process_without_its_mark_ends_with_its_trial(
    tmp_path: Path, runner: tuple[TrialRunner, WakeEvent], leaves: bool
) -> None:
    lease = Lease(300.0, sent_at=boot_time_s())
    thread = _once_started(tmp_path, runner[1], (lambda: None) if leaves else lease.cancel)
    ending = runner[0].run(order(tmp_path, leaves=leaves, bare=True), lease, timeout_s=600.0)
    thread.join()
    assert (ending.stopped, ending.survivors) == (None if leaves else StopReason.CANCELLED, ())
    assert len(_family(tmp_path)) == 4
    assert all(map(is_gone, _family(tmp_path)))


@pytest.mark.parametrize("bare", [False, True])
def test_kill_9_of_the_owner_kills_the_whole_family(tmp_path: Path, bare: bool) -> None:
    command = [sys.executable, "-m", "tests.integration.worker_family", str(tmp_path), *(["bare"] if bare else [])]
    owner = subprocess.Popen(command, cwd=ROOT)
    members = _family(tmp_path)
    until((tmp_path / "watched").exists)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    assert len(members) == (4 if bare else 3)
    until(lambda: all(map(is_gone, members)))


def test_kill_9_of_the_owner_of_a_stopped_fork_server_kills_all(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-m", "tests.integration.worker_family", str(tmp_path), "bare"], cwd=ROOT)
    members = _family(tmp_path)
    until((tmp_path / "watched").exists)
    fork_server = psutil.Process(members[0]).parent()
    assert fork_server is not None
    fork_server.suspend()
    owner.kill()
    owner.wait()
    until(lambda: all(map(is_gone, [*members, fork_server.pid])))


def test_a_fork_server_that_loses_its_clients_ends_what_they_leave(tmp_path: Path) -> None:
    """As if the kernel had closed the files of a dead worker, but not yet sent the signal of its death."""
    command = [sys.executable, "-m", "tests.integration.worker_family", str(tmp_path), "bare", "forgets"]
    owner = subprocess.Popen(command, cwd=ROOT)
    try:
        members = _family(tmp_path)
        until((tmp_path / "watched").exists)
        os.kill(owner.pid, signal.SIGSTOP)
        os.kill(members[0], signal.SIGKILL)  # the last client
        until(lambda: all(map(is_gone, members[1:])))
    finally:
        owner.kill()
        owner.wait()


def test_kill_9_of_the_fork_server_leaves_nothing_either(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.integration.worker_family", str(tmp_path), "bare", "adopts"]
    owner = subprocess.Popen(command, cwd=ROOT)
    members = _family(tmp_path)
    until((tmp_path / "watched").exists)
    psutil.Process(members[0]).parent().kill()  # type: ignore[union-attr]
    assert owner.wait(LIMIT_S) == 0
    assert len(members) == 4
    assert [pid for pid in members if not is_gone(pid)] == []


def test_trial_on_its_way_to_a_starting_fork_server_ends_with_its_worker(tmp_path: Path) -> None:
    mark = Mark("ABLATE_TEST_MARK", str(tmp_path))
    command = [sys.executable, "-m", "tests.integration.late_trial", str(tmp_path)]
    owner = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **mark.environment})
    until(lambda: len(mark.members()) >= 3)  # with the server and multiprocessing's tracker
    until((tmp_path / "sent").exists)
    owner.kill()
    owner.wait()
    until(lambda: not mark.members())
    assert not (tmp_path / "result.json").exists()


def test_end_trial_asks_strays_before_it_kills_them() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(300)"]
    leader = subprocess.Popen(command, start_new_session=True)
    stray = subprocess.Popen(command, start_new_session=True, env={**os.environ, **trial_mark("trl_asks").environment})
    assert end_trial(leader.pid, trial_id="trl_asks", grace_s=10.0) == ()
    assert (leader.wait(), stray.wait()) == (-signal.SIGTERM, -signal.SIGTERM)


def test_killed_fork_server_is_replaced_at_once(tmp_path: Path) -> None:
    """It is not dead when kill returns, and multiprocessing alone would still use it."""
    fork_server = server()
    for _ in range(8):
        trial = fork_server.start(order(tmp_path, leaves=True))
        trial.join()
        assert trial.exitcode == 0
        (owner,) = (p for p in psutil.Process().children() if "multiprocessing.forkserver" in " ".join(p.cmdline()))
        assert end_trial(trial.pid, trial_id=f"trl_{tmp_path.name}", grace_s=0) == ()
        owner.kill()


def test_check_passes_where_the_worker_is_process_1_of_its_container() -> None:
    container = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    if subprocess.run([*container, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this system does not let us make a process namespace")
    code = "import os; from ablate.workers.processes.forkserver import ForkServer as F; F().check(); print(os.getpid())"
    done = subprocess.run([*container, sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr


def test_check_names_the_import_that_failed() -> None:
    code = "from ablate.workers.processes.forkserver import ForkServer as F; F(preload='ablate.workers.absent').check()"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert "PreloadError" in answer.stderr
    assert "No module named 'ablate.workers.absent'" in answer.stderr


@pytest.mark.parametrize("length", [10, 250])
def test_processes_start_whatever_the_length_of_tmpdir(tmp_path: Path, length: int) -> None:
    folder = tmp_path / ("t" * length)
    folder.mkdir()
    code = "from ablate.workers.processes.forkserver import ForkServer as F; F(preload='json').check(); print('up')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(folder)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.stdout == "up\n", done.stderr
