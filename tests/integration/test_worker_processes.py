"""Every way of ending a trial ends its children too."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.worker_family import FamilyServer, order
from tests.integration.worker_service import until
from workers.bell import Bell
from workers.inherited import TRIAL_MARK
from workers.lease import Lease, StopReason
from workers.reaper import Reaper, end_trial
from workers.runner import Runner


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _family(folder: Path) -> list[int]:
    text = until(lambda: (folder / "result.json").exists() and (folder / "result.json").read_text())
    return [int(pid) for pid in text.split()]


@pytest.fixture
def runner() -> Iterator[tuple[Runner, Bell]]:
    bell = Bell()
    with Reaper() as reaper:
        yield Runner(FamilyServer(preload="json"), reaper, bell, grace_s=0.2, preempted=lambda: False), bell


@pytest.mark.parametrize("reason", [StopReason.CANCELLED, StopReason.FENCED, StopReason.TIMEOUT])
def test_run_stopped_kills_the_whole_family(tmp_path: Path, runner: tuple[Runner, Bell], reason: StopReason) -> None:
    lease = Lease(300.0, asked_at=time.monotonic())

    def interfere() -> None:
        _family(tmp_path)
        if reason is StopReason.CANCELLED:
            lease.cancel()
        elif reason is StopReason.FENCED:
            lease.revoke()
        runner[1].ring()

    threading.Thread(target=interfere).start()
    timeout_s = 2.0 if reason is StopReason.TIMEOUT else 60.0
    ending = runner[0].run(order(tmp_path), lease, timeout_s=timeout_s)
    assert ending.stopped is reason
    assert ending.survivors == ()
    assert [pid for pid in _family(tmp_path) if _is_alive(pid)] == []


def test_run_that_ends_by_itself_leaves_no_children(tmp_path: Path, runner: tuple[Runner, Bell]) -> None:
    ending = runner[0].run(order(tmp_path, leaves=True), Lease(300.0, asked_at=time.monotonic()), timeout_s=60.0)
    assert (ending.stopped, ending.exit_code) == (None, 0)
    assert [pid for pid in _family(tmp_path) if _is_alive(pid)] == []


def test_kill_9_of_the_owner_kills_the_whole_family(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-m", "tests.integration.worker_family", str(tmp_path)])
    members = _family(tmp_path)
    time.sleep(0.2)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    until(lambda: not any(_is_alive(pid) for pid in members), 2)


def test_end_trial_asks_strays_before_it_kills_them() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(300)"]
    leader = subprocess.Popen(command, start_new_session=True)
    stray = subprocess.Popen(command, start_new_session=True, env={**os.environ, TRIAL_MARK: "trl_asks"})
    assert end_trial(leader.pid, trial_id="trl_asks", grace_s=10.0) == ()
    assert (leader.wait(), stray.wait()) == (-signal.SIGTERM, -signal.SIGTERM)


def test_check_names_the_import_that_failed() -> None:
    code = "from workers.forkserver import ForkServer; ForkServer(preload='workers.absent').check()"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert "PreloadError" in answer.stderr
    assert "No module named 'workers.absent'" in answer.stderr


def test_check_passes_with_the_real_preload() -> None:
    code = "from workers.forkserver import ForkServer; ForkServer().check()"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (answer.returncode, answer.stderr) == (0, "")
