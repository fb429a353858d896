"""Worker, guardian and fork server stopped or killed while a real trial runs: nothing outlives its lease."""

import os
import signal
from collections.abc import Iterator
from itertools import count
from typing import Any

import psutil
import pytest

from ablate.model.config import StepsConfig
from tests.integration.worker_service import Rig, block, is_gone, processes_of, resume_all, rig_in
from tests.waiting import until

_ENDLESS = StepsConfig(warmup=1, timed=1_000_000, val_rows=0)
LEASE_S = 12.0
"""Long enough for its margin, a quarter of it: three test processes and a chaos run share two processors."""


class FrozenRig(Rig):
    """A worker that trains for ever, under short leases."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig.service, rig.home, rig.pid)
        self._log_begins = 0
        self._numbers = count()

    def begin(self) -> None:
        """Forget what earlier tests left."""
        self.fresh()
        self.service.lease_s = LEASE_S
        self._log_begins = len(self._log())

    def log(self) -> str:
        """Return the worker's log since the test began."""
        return self._log()[self._log_begins :]

    def _log(self) -> str:
        return (self.home / "worker.log").read_text()

    def claimable(self, **steps: Any) -> str:
        """Offer a block of one trial; return its attempt."""
        attempt = f"number-{next(self._numbers)}"
        self.service.blocks.append(block([self.config(**steps)], attempt=attempt, lease_s=LEASE_S))
        return attempt

    def train(self) -> int:
        """Claim an endless block; return the trainer's process id once it has made a step."""
        attempt = self.claimable(steps=_ENDLESS)
        until(lambda: any(p["steps_done"] for p in self._progress(attempt)))
        (trainer,) = self.trainers()
        return trainer

    def _progress(self, attempt: str) -> list[dict[str, int]]:
        beats = [body for path, body, _at in list(self.service.calls) if path.endswith(f"att_{attempt}:heartbeat")]
        return [item for beat in beats for item in beat["progress"]]

    def guardians(self) -> list[int]:
        return self.processes("ablate.workers.processes.guardian")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrozenRig]:
    with rig_in(tmp_path_factory.mktemp("frozen")) as rig:
        yield FrozenRig(rig)


@pytest.fixture
def rig(shared: FrozenRig) -> Iterator[FrozenRig]:
    """The shared worker, which asks for work again once the test before is over."""
    shared.begin()
    yield shared
    shared.service.away = False
    resume_all(shared.home)
    if not is_gone(shared.pid):
        until(lambda: not shared.trainers())
        claims = len(shared.service.bodies(":claim"))
        until(lambda: len(shared.service.bodies(":claim")) > claims)


@pytest.mark.parametrize("frozen", ["worker", "worker and fork server", "all but the guardian"])
def test_a_frozen_worker_has_no_trainer_when_its_lease_is_over(rig: FrozenRig, frozen: str) -> None:
    trainer = rig.train()
    stopped = {
        "worker": [rig.pid],
        "worker and fork server": [rig.pid, *rig.servers()],
        "all but the guardian": [rig.pid, *rig.servers(), trainer],
    }[frozen]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: is_gone(trainer))
    assert psutil.Process(rig.pid).status() == psutil.STATUS_STOPPED
    for pid in stopped:
        if not is_gone(pid):
            os.kill(pid, signal.SIGCONT)
    _goes_on(rig)


def _goes_on(rig: FrozenRig) -> None:
    """The worker reports nothing about the lost block, and measures the next one."""
    attempt = rig.claimable()
    until(lambda: any(path.endswith(f"att_{attempt}:report") for path, _body, _at in list(rig.service.calls)))
    reports = [body for path, body, _at in rig.service.calls if path.endswith(":report")]
    assert [report["receipts"][0]["outcome"] for report in reports] == ["measured"]


def test_a_worker_that_is_not_frozen_ends_the_trial_before_its_guardian_does(rig: FrozenRig) -> None:
    trainer = rig.train()
    rig.service.away = True
    until(lambda: is_gone(trainer))
    assert "ended nothing when its lease" not in rig.log()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_guardian_is_replaced_while_the_trial_runs(rig: FrozenRig, how: signal.Signals) -> None:
    trainer = rig.train()
    (first,) = rig.guardians()
    os.kill(first, how)
    until(lambda: rig.guardians() not in ([], [first]))
    assert not is_gone(trainer)
    beats = len(rig.service.times(":heartbeat"))
    until(lambda: len(rig.service.times(":heartbeat")) > beats + 1)  # the worker has told the new one what runs
    os.kill(rig.pid, signal.SIGSTOP)
    until(lambda: is_gone(trainer))
    assert "guardian" in rig.log()


def test_a_trial_that_its_worker_could_not_report_is_ended_too(rig: FrozenRig) -> None:
    """The worker is stopped at most shortly after it started the trial, often before it reported it to the guardian."""
    attempt = rig.claimable(steps=_ENDLESS)
    prepared = rig.home / "work" / f"att_{attempt}" / f"trl_{attempt}_0" / "prepared.json"
    preparing: set[int] = set()

    def trains() -> bool:
        is_prepared, running = prepared.exists(), set(rig.trainers())
        preparing.update(set() if is_prepared else running)
        return is_prepared and running > preparing & running

    until(trains)
    os.kill(rig.pid, signal.SIGSTOP)
    until(lambda: not rig.trainers())


def test_frozen_worker_killed_afterwards_leaves_nothing(rig: FrozenRig) -> None:
    rig.train()
    os.kill(rig.pid, signal.SIGSTOP)
    os.kill(rig.pid, signal.SIGKILL)
    until(lambda: not processes_of(rig.home))
