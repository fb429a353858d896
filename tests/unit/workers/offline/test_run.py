import io
import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from ablate.experiments.design.plan import Plan
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.bundle_files import read_bundle_files
from ablate.experiments.records.bundle_reader import open_bundle
from ablate.experiments.records.identity import ClaimedBlock
from ablate.experiments.records.receipts import Receipt
from ablate.experiments.reporting.view import judge_bundle
from ablate.workers.errors import BlockBroken, BlockStopped, ExecRefused
from ablate.workers.lease import StopReason
from ablate.workers.offline import run as offline_run
from ablate.workers.offline.bundle_folder import BundleFolder
from ablate.workers.offline.progress import ProgressDisplay
from ablate.workers.offline.run import ExecRun, ExecSummary
from tests.bundles import make_file, make_node
from tests.factories import make_receipt

FILE = make_file(limits={"device_minutes": 5.0})
OUT_OF_MEMORY = {"outcome": "oom", "message": "768 MiB do not fit", "steps": (), "validations": ()}


class Runner:
    """Ends blocks as it is told, in order; afterwards every block is measured."""

    def __init__(self, folder: BundleFolder, node_id: str) -> None:
        self.endings: list[BaseException] = []
        self.quarantine: str | None = None
        self.refused: list[str] = []
        self.ran: list[tuple[int, int]] = []
        self.final: dict[tuple[int, int, str], tuple[FailureClass, ...]] = {}
        """By block index, number of the attempt and arm."""
        self.display: ProgressDisplay | None = None
        self.oom: set[str] = set()
        """Arms whose trials run out of memory."""
        self._folder, self._node_id = folder, node_id

    def run(self, block: ClaimedBlock, _lease: object, output: Any) -> tuple[Receipt, ...]:
        self.ran.append((block.block_index, block.attempt_no))
        self.final |= {(*self.ran[-1], trial.arm): trial.final_failures for trial in block.trials}
        if self.endings:
            raise self.endings.pop(0)
        receipts = []
        for trial in block.trials:
            files = self._folder.paths.trial(block.attempt_id, trial.trial_id)
            files.log.write_text("said\n")
            output.add(trial.trial_id, files, steps_total=5)
            ids = {"ablation": FILE.ablation_id, "block": block.block_id, "trial": trial.trial_id}
            ids |= {"attempt": block.attempt_id, "node": self._node_id}
            ends = OUT_OF_MEMORY if trial.arm in self.oom else {}
            receipts.append(make_receipt(FILE.plan, block.block_index, trial.arm, ids=ids, **ends))
            if self.display is not None:
                assert f"block {block.block_index + 1}/6, {trial.arm}: step 0/5" in self.display.now()
                self.display.measured(receipts[-1])
        return tuple(receipts)

    def rehearse(self, block: ClaimedBlock, _lease: object, _output: object) -> list[str]:
        if self.endings:
            raise self.endings.pop(0)
        return self.refused


class Rig:
    def __init__(self, folder: BundleFolder) -> None:
        self.folder = folder
        self.printed = io.StringIO()
        node = make_node()
        node_id = folder.add_node(node.name, node.registration, self.bundle())
        self.runner = Runner(folder, node_id)
        self.display = ProgressDisplay(Console(file=self.printed, width=300), name="x", blocks=6, trials_per_block=3)
        self.execution = ExecRun(FILE, folder, self.runner, self.display, node_id=node_id)  # type: ignore[arg-type]

    def bundle(self) -> Any:
        return open_bundle(read_bundle_files(self.folder.root))

    def run(self, *indices: int, stopping: Callable[[], bool] = lambda: False) -> ExecSummary:
        return self.execution.run(indices, self.bundle(), stopping=stopping)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with BundleFolder(tmp_path / "b", FILE) as folder:
        folder.open()
        yield Rig(folder)


def test_run_measures_what_was_asked_for_and_says_so(rig: Rig) -> None:
    rig.runner.display = rig.display
    summary = rig.run(0, 2)
    assert (summary.done, summary.failed, summary.stopped) == ((0, 2), (), None)
    assert [block.attempt.index for block in rig.bundle().blocks] == [0, 2]
    assert "block 1/6, baseline: measured in 3.0 s" in rig.printed.getvalue()
    assert "min left" in rig.printed.getvalue()
    assert rig.display.now() == ""
    assert list(rig.folder.work.glob("att_*")) == []


class Clock:
    """Time that passes in sleeps only."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(offline_run, "time", clock)
    return clock


@pytest.mark.parametrize("failure", [one for one in FailureClass if one.rule.attempts > 1], ids=str)
def test_a_broken_block_waits_as_in_a_service_before_it_runs_again(
    rig: Rig, clock: Clock, failure: FailureClass
) -> None:
    rule, starts = failure.rule, []
    rig.runner.endings = [BlockBroken(failure, "it broke", arm="psiv-on")] * rule.attempts
    run = rig.runner.run
    rig.runner.run = lambda *order: (starts.append(clock.now), run(*order))[1]  # type: ignore[method-assign]
    summary = rig.run(0, 1)
    assert (summary.done, summary.failed) == ((1,), (0,))
    rests = [rule.rests_s[min(number, len(rule.rests_s) - 1)] for number in range(rule.attempts - 1)]
    assert np.diff(starts) == pytest.approx([*rests, 0.0])


@pytest.mark.parametrize("stops_at_s", [0.1, 0.5, 3.0, 14.9])
def test_a_signal_ends_the_pause_of_a_broken_block(rig: Rig, clock: Clock, stops_at_s: float) -> None:
    rig.runner.endings = [BlockBroken(FailureClass.INVALID_MEASUREMENT, "a clock was slow")] * 2
    clock.now = -FailureClass.INVALID_MEASUREMENT.rule.rests_s[0]  # the pause after the second attempt begins at 0
    summary = rig.run(0, stopping=lambda: clock.now >= stops_at_s)
    assert (summary.done, summary.stopped) == ((), "a signal stopped it")
    assert len(rig.runner.ran) == 2
    assert stops_at_s <= clock.now < stops_at_s + 0.3


@pytest.mark.parametrize("arms", [{"baseline"}, {"psiv-on", "chunk-32"}, {"baseline", "psiv-on", "chunk-32"}])
def test_a_first_block_that_compares_nothing_ends_the_run_and_the_next_run_goes_on(rig: Rig, arms: set[str]) -> None:
    rig.runner.oom = arms
    summary = rig.run(0, 1, 2)
    assert summary.done == (0,)
    assert summary.stopped is not None
    assert "oom in the first block, so nothing can be compared: 768 MiB do not fit" in summary.stopped
    assert summary.stopped.startswith("every arm") == (len(arms) == 3)
    assert rig.run(0, 1, 2).done == (0, 1, 2)


def test_a_variant_without_memory_leaves_the_others_their_blocks(rig: Rig) -> None:
    rig.runner.oom = {"psiv-on"}
    assert rig.run(0, 1).done == (0, 1)


def test_run_keeps_finished_blocks(rig: Rig) -> None:
    rig.run(0)
    assert rig.run(0, 1).done == (0, 1)
    assert rig.runner.ran == [(0, 1), (1, 1)]


def test_broken_block_is_tried_again_whole(rig: Rig) -> None:
    rig.runner.endings = [BlockBroken(FailureClass.NO_RECEIPT, "it died")]
    assert rig.run(0).done == (0,)
    bundle = rig.bundle()
    assert [record.attempt_no for record in bundle.broken] == [1]
    assert bundle.blocks[0].attempt.attempt_no == 2
    assert "block 1 broke, no_receipt 1 of 3: it died" in rig.printed.getvalue()


def test_attempts_are_used_up_over_several_runs(rig: Rig) -> None:
    rig.runner.endings = [BlockBroken(FailureClass.TIMEOUT, "slow"), BlockStopped(StopReason.PREEMPTED)]
    first = rig.run(0, 1)
    assert (first.done, first.stopped) == ((), "it was stopped (preempted); block 1 will run again whole")
    rig.runner.endings = [BlockBroken(FailureClass.TIMEOUT, "slow")]
    second = rig.run(0, 1)
    assert (second.done, second.failed) == ((1,), (0,))
    assert rig.runner.ran == [(0, 1), (0, 2), (0, 3), (1, 1)]
    assert rig.run(0).failed == (0,)
    kept = [(record.attempt_no, record.failure_class) for record in rig.bundle().broken]
    assert kept == [(1, FailureClass.TIMEOUT), (2, FailureClass.PREEMPTED), (3, FailureClass.TIMEOUT)]


def test_arm_that_was_late_before_is_told_that_its_next_timeout_is_its_result(rig: Rig) -> None:
    rig.runner.endings = [BlockBroken(FailureClass.TIMEOUT, "slow", arm="psiv-on")]
    assert rig.run(0, 1).done == (0, 1)
    final = {key: FailureClass.TIMEOUT in classes for key, classes in rig.runner.final.items()}
    assert {key for key, is_final in final.items() if is_final} == {(0, 2, "psiv-on"), (1, 1, "psiv-on")}
    assert [record.arm for record in rig.bundle().broken] == ["psiv-on"]


def test_killed_run_leaves_its_attempt_as_evidence(tmp_path: Path) -> None:
    root = tmp_path / "b"
    with BundleFolder(root, FILE) as folder:
        folder.open()
        rig = Rig(folder)
        rig.runner.endings = [SystemExit(9)]
        with pytest.raises(SystemExit):
            rig.run(2)
        attempt_id = json.loads((folder.work / "running.json").read_text())["attempt_id"]
        for age_s, trial_id in zip((60, 30), FILE.blocks[2].trial_ids[:2], strict=True):
            steps = folder.paths.trial(attempt_id, trial_id).steps
            steps.parent.mkdir(parents=True, exist_ok=True)
            steps.write_text("{}")
            os.utime(steps, times=(time.time() - age_s,) * 2)
    for _ in range(2):
        with BundleFolder(root, FILE) as again:
            (killed,) = again.open().broken
    arm = FILE.plan.blocks[2].order[1]
    assert (killed.index, killed.attempt_no, killed.failure_class) == (2, 1, FailureClass.INFRA_NODE)
    assert (killed.arm, killed.message) == (arm, f"the run was killed while arm '{arm}' ran")
    with BundleFolder(root, FILE) as folder:
        folder.open()
        rig = Rig(folder)
        assert rig.run(2).done == (2,)
        assert rig.runner.ran == [(2, 2)]


def test_block_that_was_kept_before_the_kill_is_no_broken_attempt(tmp_path: Path) -> None:
    root = tmp_path / "b"
    with BundleFolder(root, FILE) as folder:
        folder.open()
        rig = Rig(folder)
        folder.drop_work_of = lambda _attempt_id: None  # type: ignore[method-assign] # a kill cleans nothing up
        rig.run(2)
    with BundleFolder(root, FILE) as again:
        bundle = again.open()
    assert ([block.attempt.index for block in bundle.blocks], bundle.broken) == ([2], ())


def test_nothing_is_started_when_asked_to_stop_or_when_the_node_is_broken(rig: Rig) -> None:
    assert rig.run(0, stopping=lambda: True).stopped == "a signal stopped it"
    rig.runner.quarantine = "GPU 0 still holds 99 MiB"
    assert "must be repaired first: GPU 0 still holds 99 MiB" in str(rig.run(0).stopped)
    assert rig.runner.ran == []


def test_spent_device_minutes_stop_between_blocks(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.run(0)
    assert rig.bundle().missing, "blocks are missing, and nothing says why"
    assert judge_bundle(rig.bundle()).circumstances.not_run is None
    path = rig.folder.root / "blocks" / "0001" / "block.json"
    record = rig.bundle().blocks[0].attempt
    later = record.model_copy(update={"ended_at": record.started_at + timedelta(days=365)})
    path.write_text(later.model_dump_json())
    rig.folder.seal()
    summary = rig.run(0, 1)
    assert summary.done == (0,)
    assert "of 5 device minutes is used up" in str(summary.stopped)
    assert judge_bundle(rig.bundle()).circumstances.not_run == summary.stopped


def test_device_minutes_are_those_of_all_devices_of_a_step(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "busy_devices", property(lambda _plan: 10**9))
    summary = rig.run(0, 1)
    assert summary.done == (0,)
    assert "of 5 device minutes is used up" in str(summary.stopped)


def test_rehearsal_refuses(rig: Rig) -> None:
    rig.execution.rehearse(0)
    rig.runner.refused = ["arm 'psiv-on': not implemented"]
    with pytest.raises(ExecRefused, match="arm 'psiv-on': not implemented"):
        rig.execution.rehearse(0)
    rig.runner.endings = [BlockBroken(FailureClass.TIMEOUT, "too slow"), BlockStopped(StopReason.PREEMPTED)]
    with pytest.raises(ExecRefused, match="the rehearsal failed: too slow"):
        rig.execution.rehearse(0)
    with pytest.raises(ExecRefused, match="the rehearsal was stopped: preempted"):
        rig.execution.rehearse(0)
    assert rig.bundle().broken == ()
