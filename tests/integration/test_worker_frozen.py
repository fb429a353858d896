"""Worker, guardian and fork server stopped or killed while a real trial runs: nothing outlives its lease."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from model.config import StepsConfig
from tests.integration.worker_service import (
    Service,
    block,
    children_of,
    config_json,
    corpus,
    is_gone,
    processes_of,
    worker,
)
from tests.waiting import until
from workers.lease import boot_time_s, margin_s

_ENDLESS = StepsConfig(warmup=1, timed=1_000_000, val_rows=0)
LEASE_S = 8.0


class Rig:
    """A worker that trains for ever, under short leases."""

    def __init__(self, service: Service, home: Path, pid: int) -> None:
        self.service = service
        self.home = home
        self.pid = pid
        self.corpus = corpus(home / "corpus")

    def train(self, attempt: str) -> int:
        """Claim an endless block; return the trainer's process id once it has made a step."""
        self.service.blocks.append(block([config_json(self.corpus, steps=_ENDLESS)], attempt=attempt, lease_s=LEASE_S))
        until(lambda: any(p["steps_done"] for p in self._progress(attempt)))
        (trainer,) = self.trainers()
        return trainer

    def _progress(self, attempt: str) -> list[dict[str, int]]:
        beats = [body for path, body, _at in list(self.service.calls) if path.endswith(f"att_{attempt}:heartbeat")]
        return [item for beat in beats for item in beat["progress"]]

    def trainers(self) -> list[int]:
        """Children of the fork server."""
        return [child.pid for server in self.servers() for child in children_of(server)]

    def servers(self) -> list[int]:
        return self._children("multiprocessing.forkserver")

    def guardians(self) -> list[int]:
        return self._children("workers.processes.guardian")

    def _children(self, word: str) -> list[int]:
        return [pid for pid, command in processes_of(self.home).items() if word in command and not _is_forked(pid)]


def _is_forked(pid: int) -> bool:
    """Return whether it is a trainer, which has the fork server's command line."""
    try:
        return "multiprocessing.forkserver" in " ".join(psutil.Process(psutil.Process(pid).ppid()).cmdline())
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    service = Service()
    service.lease_s = LEASE_S
    with worker(tmp_path, f"http://127.0.0.1:{service.port}") as process:
        until(lambda: service.bodies(":claim"))
        try:
            yield Rig(service, tmp_path, process.pid)
        finally:
            for pid in processes_of(tmp_path):
                os.kill(pid, signal.SIGCONT)
    service.close()


@pytest.mark.parametrize("frozen", ["worker", "worker and fork server", "all but the guardian"])
def test_a_frozen_worker_has_no_trainer_when_its_lease_is_over(rig: Rig, frozen: str) -> None:
    trainer = rig.train("frozen")
    stopped = {
        "worker": [rig.pid],
        "worker and fork server": [rig.pid, *rig.servers()],
        "all but the guardian": [rig.pid, *rig.servers(), trainer],
    }[frozen]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: is_gone(trainer))
    lived_s = boot_time_s() - max(rig.service.times(":heartbeat"))
    assert lived_s < LEASE_S
    assert lived_s > LEASE_S - margin_s(LEASE_S) - 2  # not before the lease is over
    for pid in stopped:
        if not is_gone(pid):
            os.kill(pid, signal.SIGCONT)
    _goes_on(rig)


def _goes_on(rig: Rig) -> None:
    """The worker reports nothing about the lost block, and measures the next one."""
    rig.service.blocks.append(block([config_json(rig.corpus)], attempt="next"))
    until(lambda: any(path.endswith("att_next:report") for path, _body, _at in list(rig.service.calls)))
    reports = [body for path, body, _at in rig.service.calls if path.endswith(":report")]
    assert [report["receipts"][0]["outcome"] for report in reports] == ["measured"]
    assert rig.service.bodies(":release") == []


def test_a_worker_that_is_not_frozen_ends_the_trial_before_its_guardian_does(rig: Rig) -> None:
    trainer = rig.train("away")
    rig.service.away = True
    until(lambda: is_gone(trainer))
    assert boot_time_s() - max(rig.service.times(":heartbeat")) < LEASE_S
    assert "ended nothing when its lease" not in (rig.home / "worker.log").read_text()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_guardian_is_replaced_while_the_trial_runs(rig: Rig, how: signal.Signals) -> None:
    trainer = rig.train("alone")
    (first,) = rig.guardians()
    os.kill(first, how)
    until(lambda: rig.guardians() not in ([], [first]))
    assert not is_gone(trainer)
    time.sleep(1.0)  # so that the new one gets its state from the start, not from the next heartbeat
    os.kill(rig.pid, signal.SIGSTOP)
    until(lambda: is_gone(trainer))
    assert boot_time_s() - max(rig.service.times(":heartbeat")) < LEASE_S
    assert "guardian" in (rig.home / "worker.log").read_text()


def test_a_trial_that_its_worker_could_not_report_is_ended_too(rig: Rig) -> None:
    """The worker is stopped at most shortly after it started the trial, often before it reported it to the guardian."""
    rig.service.blocks.append(block([config_json(rig.corpus, steps=_ENDLESS)], attempt="early", lease_s=LEASE_S))
    until(rig.trainers)
    os.kill(rig.pid, signal.SIGSTOP)
    until(lambda: not rig.trainers())
    claimed_at = max(at for path, _body, at in rig.service.calls if path.endswith(":claim"))
    beats = [at for path, _body, at in rig.service.calls if path.endswith(":heartbeat")]
    assert boot_time_s() - max([claimed_at, *beats]) < LEASE_S


def test_frozen_worker_killed_afterwards_leaves_nothing(rig: Rig) -> None:
    rig.train("both")
    os.kill(rig.pid, signal.SIGSTOP)
    os.kill(rig.pid, signal.SIGKILL)
    until(lambda: not processes_of(rig.home))
