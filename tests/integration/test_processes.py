"""What service and workers both build on, with real processes; their own tests prove the rest."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from functools import partial
from itertools import count

import pytest

from ablate.experiments.system.processes import Ended, Mark, die_with_parent, end_all, group_members, is_alive
from tests.waiting import LIMIT_S

_SLEEP = "print('ready', flush=True); time.sleep(600)"
WILLING = f"import time; {_SLEEP}"
DEAF = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {_SLEEP}"
ZOMBIE_MAKER = f"""
import os, time
child = os.fork() or os._exit(0)
os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie
{_SLEEP}
"""


class Family:
    """Processes with a mark of their own, each in a session of its own."""

    def __init__(self) -> None:
        self.mark = Mark("ABLATE_TEST_MARK", uuid.uuid4().hex)
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, code: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **self.mark.environment},
        )
        self.started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    def pids(self) -> list[int]:
        return self.mark.members()


@pytest.fixture
def family() -> Iterator[Family]:
    made = Family()
    yield made
    for process in made.started:
        process.kill()
        process.communicate()


def test_end_all_asks_first_and_kills_who_does_not_listen(family: Family) -> None:
    willing, deaf = family.start(WILLING), family.start(DEAF)
    assert sorted(family.pids()) == sorted([willing.pid, deaf.pid])
    looks = count()

    def find() -> list[int]:
        if next(looks):  # asked already: the willing one gets the time that it needs
            willing.wait(LIMIT_S)
        return family.pids()

    assert end_all(find, grace_s=0.5) == Ended(killed=(deaf.pid,), survivors=())
    assert (willing.wait(LIMIT_S), deaf.wait(LIMIT_S)) == (-signal.SIGTERM, -signal.SIGKILL)


def test_end_all_without_grace_kills_at_once(family: Family) -> None:
    willing = family.start(WILLING)
    assert end_all(family.pids, grace_s=0) == Ended(killed=(willing.pid,), survivors=())
    assert willing.wait(LIMIT_S) == -signal.SIGKILL


def test_end_all_names_who_survives(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test can make a process survive SIGKILL; one that is found for ever stands for it."""
    monkeypatch.setattr("ablate.experiments.system.processes._KILL_PATIENCE_S", 0.1)
    pid = family.start(WILLING).pid
    assert end_all(lambda: [pid], grace_s=0) == Ended(killed=(pid,), survivors=(pid,))


def test_zombies_do_not_count(family: Family) -> None:
    parent = family.start(ZOMBIE_MAKER)
    assert group_members(parent.pid) == family.pids() == [parent.pid]
    parent.kill()
    os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(parent.pid)
    assert group_members(parent.pid) == family.pids() == []


def test_mark_finds_a_process_from_its_first_moment(family: Family) -> None:
    """Popen returns inside exec, when the old environment is gone and the new one is not there yet."""
    for _ in range(200):
        process = subprocess.Popen(["sleep", "600"], env=family.mark.environment)
        pids = family.pids()
        process.kill()
        process.wait()
        assert pids == [process.pid]


def test_die_with_parent_ends_an_orphan_at_once() -> None:
    for parent, code in ((os.getpid(), 0), (os.getpid() + 1, 1)):
        ask = partial(die_with_parent, signal.SIGTERM, parent=parent)
        done = subprocess.run([sys.executable, "-c", "pass"], preexec_fn=ask, check=False)
        assert done.returncode == code
