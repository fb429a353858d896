"""Blocks whose trials run in slices: random schedules against an oracle, and real trainers of a real worker."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records import receipt_check
from ablate.experiments.records.identity import ClaimedBlock
from ablate.experiments.records.receipt_clocks import slice_problems
from ablate.experiments.records.receipts import Receipt
from ablate.model.config import StepsConfig
from tests.integration.test_exec import ROOT
from tests.integration.worker_service import Rig, block, is_gone, rig_in
from tests.waiting import until

LEASE_S = 8.0
LONG = StepsConfig(warmup=1, timed=600_000, slice=3, val_rows=0)
"""Slices that never end during a test."""


def test_random_schedules_run_in_the_order_of_the_oracle(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.integration.slice_schedules", str(tmp_path), "25"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["wrong"] == []
    assert {tuple(one) for one in answer["seen"]} >= {(how, True) for how in ("returns", "exits", "is killed", "hangs")}


class SlicedRig(Rig):
    """A worker whose blocks run in slices."""

    def claimed(self, attempt: str, steps: StepsConfig, arms: int = 3, **options: Any) -> ClaimedBlock:
        return block([self.config(steps=steps)] * arms, attempt=attempt, **options)

    def until_slices_run(self, attempt: str, arms: int = 3) -> list[int]:
        """Wait until every trial has run a slice; return the trainers in the block's order."""
        folders = [self.home / "work" / f"att_{attempt}" / f"trl_{attempt}_{arm}" for arm in range(arms)]
        until(lambda: all(_steps(folder) > 5 for folder in folders))
        trainers = self.trainers()
        assert len(trainers) == arms
        return trainers

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = until(lambda: self.service.bodies(":report"))[0]
        return report


def _steps(folder: Path) -> int:
    try:
        return len((folder / "steps.jsonl").read_bytes().splitlines())
    except FileNotFoundError:
        return 0


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlicedRig]:
    with rig_in(tmp_path_factory.mktemp("slices")) as running:
        yield SlicedRig(running.service, running.home, running.pid)


@pytest.fixture(autouse=True)
def _fresh(rig: SlicedRig) -> None:
    rig.fresh()


def test_slices_alternate_and_every_trial_has_a_whole_receipt(rig: SlicedRig) -> None:
    steps = StepsConfig(warmup=1, warmup_s=0.05, timed=12, slice=2, val_rows=2)
    rig.service.blocks.append(rig.claimed("good", steps))
    report = rig.report()
    assert report["failure_class"] is None, report["message"]
    assert [receipt_check.verify(receipt) for receipt in report["receipts"]] == [[], [], []]
    receipts = [Receipt.model_validate(receipt) for receipt in report["receipts"]]
    assert list(slice_problems(receipts)) == []
    assert [arm for _began, _ended, arm in _line(receipts)] == [0, 1, 2, 2, 1, 0] * 3
    assert all(later[0] >= earlier[1] for earlier, later in pairwise(_line(receipts)))
    assert len({receipt.summary.loss_final for receipt in receipts if receipt.summary}) == 1
    assert all((receipt.waited_s or 0.0) > 0 for receipt in receipts)
    beats = [p for body in rig.service.bodies(":heartbeat") for p in body["progress"]]
    assert {p["trial_id"] for p in beats} <= {f"trl_good_{arm}" for arm in range(3)}
    for arm in range(3):
        log = rig.home / "work" / "att_good" / f"trl_good_{arm}" / "log.txt"
        assert rig.service.log_of(f"trl_good_{arm}") == log.read_text()
    assert rig.trainers() == []


def _line(receipts: list[Receipt]) -> list[tuple[float, float, int]]:
    """Begin, end and arm of every slice of two timed steps, by the machine's clock."""
    spans = []
    for number, receipt in enumerate(receipts):
        timed = [step for step in receipt.steps if step.phase == "timed"]
        for first, last in zip(timed[::2], timed[1::2], strict=True):
            start = receipt.training_began_s or 0.0
            spans.append((start + first.began_s, start + last.ended_s, number))
    return sorted(spans)


def test_a_trial_that_dies_in_the_middle_is_its_result_and_the_others_go_on(rig: SlicedRig) -> None:
    claimed = rig.claimed("dies", StepsConfig(warmup=1, timed=120, slice=2, val_rows=0))
    dies = {"final_failures": (*claimed.trials[1].final_failures, FailureClass.NO_RECEIPT)}
    trials = (claimed.trials[0], claimed.trials[1].model_copy(update=dies), claimed.trials[2])
    rig.service.blocks.append(claimed.model_copy(update={"trials": trials}))
    os.kill(rig.until_slices_run("dies")[1], signal.SIGSEGV)
    report = rig.report()
    assert [receipt["outcome"] for receipt in report["receipts"]] == ["measured", "failed", "measured"]
    assert "SIGSEGV" in report["receipts"][1]["message"]
    assert [receipt_check.verify(receipt) for receipt in report["receipts"]] == [[], [], []]
    assert list(slice_problems([Receipt.model_validate(receipt) for receipt in report["receipts"]])) == []


def test_a_trial_that_is_killed_from_outside_breaks_the_block_and_ends_the_others(rig: SlicedRig) -> None:
    rig.service.blocks.append(rig.claimed("shot", LONG))
    os.kill(rig.until_slices_run("shot")[2], signal.SIGKILL)
    report = rig.report()
    assert (report["failure_class"], report["arm"], report["receipts"]) == ("infra_node", "arm-2", [])
    assert rig.trainers() == []


def test_trainers_and_worker_share_the_device_locks_until_a_cancel_ends_all(rig: SlicedRig) -> None:
    rig.service.blocks.append(rig.claimed("held", LONG, arms=2))
    (locks,) = {frozenset(_locks_of(pid)) for pid in (*rig.until_slices_run("held", arms=2), rig.pid)}
    assert locks
    rig.service.cancel = True
    assert rig.report()["failure_class"] == "cancelled"
    assert rig.trainers() == []
    assert not locks & _trainer_locks()


def _trainer_locks() -> set[str]:
    """Inodes of all device locks of trainers on this machine."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return {line[6] for line in lines if len(line) > 7 and ":trainer:" in line[7]}


def _locks_of(pid: int) -> set[str]:
    links = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return {link[8:-1] for link in links if link.startswith("socket:[")} & _trainer_locks()


def test_a_lost_lease_ends_all_trainers_silently(rig: SlicedRig) -> None:
    rig.service.blocks.append(rig.claimed("stale", LONG))
    rig.until_slices_run("stale")
    rig.service.stale = True
    until(lambda: not rig.trainers())
    assert rig.service.bodies(":report") == []


def test_the_guardian_ends_all_trainers_of_a_frozen_worker(rig: SlicedRig) -> None:
    rig.service.lease_s = LEASE_S
    rig.service.blocks.append(rig.claimed("frozen", LONG, lease_s=LEASE_S))
    trainers = rig.until_slices_run("frozen")
    os.kill(rig.pid, signal.SIGSTOP)
    try:
        until(lambda: all(map(is_gone, trainers)))
        assert psutil.Process(rig.pid).status() == psutil.STATUS_STOPPED
    finally:
        os.kill(rig.pid, signal.SIGCONT)
    claims = len(rig.service.bodies(":claim"))
    until(lambda: len(rig.service.bodies(":claim")) > claims)
    assert rig.service.bodies(":report") == []


def test_load_by_others_during_the_slices_spoils_the_block_and_is_named(rig: SlicedRig) -> None:
    """The other trainers of the block do not count as load, but busy processes do."""
    steps = StepsConfig(warmup=1, timed=120, slice=2, val_rows=0)
    rig.service.blocks.append(rig.claimed("load", steps).model_copy(update={"max_foreign_load": 0.01}))
    spin = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        report = rig.report()
    finally:
        for process in spin:
            process.kill()
            process.wait()
    assert (report["failure_class"], report["receipts"]) == ("disturbed", [])
    assert "arm 'arm-0': others took" in report["message"]
    assert "python" in report["message"].partition("busiest: ")[2]
