"""Claim blocks, run their trials one after another, report. The whole life of a worker between its two signals."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from experiments.messages import BlockReport, ClaimedBlock, ClaimedTrial, Release
from experiments.outcomes import FailureClass
from workers import devices, environment
from workers.bell import Bell
from workers.errors import ApiRefused, ApiUnreachable, StaleLease
from workers.feed import BlockFeed
from workers.heartbeat import Pulse
from workers.lease import Lease, StopReason
from workers.node import Node
from workers.paths import JobPaths, write_whole
from workers.record import BlockBroken, TrialRecord
from workers.reporting import ServiceApi, persistently
from workers.result import TrialOrder, read_config, read_result
from workers.runner import Ending, Runner
from workers.settings import Settings

_log = logging.getLogger(__name__)

_REPORT_PATIENCE_LEASES = 10
"""Leases to go on trying to hand in a finished block: its token, not its lease, decides whether it still counts."""

_RELEASE_PATIENCE_S = 3.0
_LOG_DRAIN_BEATS = 200
_MESSAGE_LIMIT = 2000  # characters


class BlockStopped(Exception):
    """The block was ended from outside, for `reason`."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What this node runs blocks with."""

    settings: Settings
    node: Node
    runner: Runner
    api: ServiceApi
    bell: Bell


class Supervisor:
    """The loop: wait for a wake-up or the poll interval, claim until nothing waits, run what was claimed."""

    def __init__(self, bench: Bench, node_id: str, *, poll_s: float, stopping: Callable[[], bool]) -> None:
        self._bench = bench
        self._node_id = node_id
        self._poll_s = poll_s
        self._stopping = stopping
        self._paths = JobPaths(home=bench.settings.home_dir)
        self._prepared: dict[str, Path] = {}
        """Dataset folders by what decides their content."""
        self._quarantine: str | None = None

    def run(self) -> None:
        """Serve until asked to stop."""
        while not self._stopping():
            asked_at = time.monotonic()
            block = self._claim()
            if block is None:
                self._bench.bell.wait(self._poll_s)
                continue
            self._paths.clean(keep=self._bench.settings.keep_attempts - 1)
            self.run_block(block, asked_at=asked_at)

    def run_block(self, block: ClaimedBlock, *, asked_at: float) -> None:
        """Run one claimed block to its report, its release, or, when the lease is lost, to nothing."""
        _log.info("block %s: attempt %d, %d trials", block.block_id, block.attempt_no, len(block.trials))
        lease = Lease(block.lease_s, asked_at=asked_at)
        feed = BlockFeed()
        used_before = devices.memory_used()
        with Pulse(self._bench.api, block, lease, feed=feed, bell=self._bench.bell) as pulse:
            report, release = self._measure(block, lease, feed)
            self._check_devices(used_before)
            if report is not None or release is not None:
                _drain(feed, pulse)
        self._hand_in(block, report, release, feed)

    def _measure(self, block: ClaimedBlock, lease: Lease, feed: BlockFeed) -> tuple[BlockReport | None, Release | None]:
        """Return the block's report, or its release, or neither when the lease is lost."""
        try:
            receipts = tuple(self._trial(block, trial, lease, feed=feed) for trial in block.trials)
        except BlockBroken as broken:
            _log.warning("block %s is broken: %s", block.block_id, broken.message)
            report = BlockReport(token=block.token, failure_class=broken.failure_class, message=broken.message)
            return report, None
        except BlockStopped as stopped:
            _log.warning("block %s was stopped: %s", block.block_id, stopped.reason)
            return None, _release(block, stopped.reason)
        except Exception as error:  # the task boundary: the report records it
            _log.exception("block %s: this worker failed", block.block_id)
            message = f"the worker failed: {type(error).__name__}: {error}"[:_MESSAGE_LIMIT]
            return BlockReport(token=block.token, failure_class=FailureClass.INFRA_NODE, message=message), None
        return BlockReport(token=block.token, receipts=receipts), None

    def _trial(self, block: ClaimedBlock, trial: ClaimedTrial, lease: Lease, *, feed: BlockFeed) -> dict[str, object]:
        """Run one trial; return its receipt as JSON and leave it on disk."""
        paths = self._paths.trial(block.attempt_id, trial.trial_id)
        feed.add(trial.trial_id, paths, steps_total=_steps_total(trial))
        order = TrialOrder(
            trial_id=trial.trial_id, config=trial.config, paths=paths, data_dir=self._bench.settings.data_path
        )
        order = replace(order, dataset=self._prepare(order, lease, timeout_s=trial.timeout_s))
        load, started_at = environment.load_average(), datetime.now(UTC)
        ending = self._run(order, lease, timeout_s=trial.timeout_s)
        record = TrialRecord(
            block=block,
            trial=trial,
            node=self._bench.node,
            node_id=self._node_id,
            paths=paths,
            ending=ending,
            started_at=started_at,
            load_average=load,
        )
        receipt = record.receipt()
        write_whole(paths.receipt, receipt.model_dump_json(indent=1))
        _log.info("trial %s (%s): %s in %.2f s", trial.trial_id, trial.arm, receipt.outcome, ending.wall_s)
        return receipt.model_dump(mode="json")

    def _prepare(self, order: TrialOrder, lease: Lease, *, timeout_s: float) -> Path | None:
        """Build the dataset in a process of its own, once, so that no trial's time contains it.

        Returns its folder, or None when it cannot be built: the trial meets the same error and its receipt says so.
        """
        key = _data_key(order)
        known = self._prepared.get(key)
        if known is not None and known.is_dir():
            return known
        self._run(replace(order, prepare_only=True), lease, timeout_s=timeout_s)
        result = read_result(order.paths.prepared)
        if result is None:
            raise BlockBroken(FailureClass.INFRA_NODE, "the dataset's preparation ended without a result")
        if result.data_folder is not None:
            self._prepared[key] = result.data_folder
        return result.data_folder

    def _run(self, order: TrialOrder, lease: Lease, *, timeout_s: float) -> Ending:
        ending = self._bench.runner.run(order, lease, timeout_s=timeout_s)
        if ending.survivors:
            self._quarantine = f"processes {list(ending.survivors)} survived SIGKILL"
            raise BlockBroken(FailureClass.INFRA_NODE, self._quarantine)
        if ending.stopped is StopReason.TIMEOUT:
            raise BlockBroken(FailureClass.TIMEOUT, f"trial {order.trial_id} took longer than {timeout_s:.0f} s")
        if ending.stopped is not None:
            raise BlockStopped(ending.stopped)
        return ending

    def _check_devices(self, used_before: dict[int, int]) -> None:
        """Quarantine this node when a device's memory does not come back."""
        problem = devices.memory_is_free(used_before)
        if problem is not None:
            self._quarantine = problem

    def _claim(self) -> ClaimedBlock | None:
        if self._quarantine is not None:
            _log.error(
                "this node claims nothing any more: %s; restart the worker when it is repaired", self._quarantine
            )
            return None
        try:
            return self._bench.api.claim(self._node_id)
        except ApiUnreachable as error:
            _log.warning("claim: %s", error)
        except StaleLease as error:
            _log.warning("claim refused: %s", error)
        return None

    def _hand_in(
        self, block: ClaimedBlock, report: BlockReport | None, release: Release | None, feed: BlockFeed
    ) -> None:
        """Report or release; a refused token means that the block is somebody else's by now."""
        api = self._bench.api
        try:
            if report is not None:
                whole = report.model_copy(update={"logs": feed.chunks()})
                patience = _REPORT_PATIENCE_LEASES * block.lease_s
                persistently(lambda: api.report(block.attempt_id, whole), patience_s=patience, sleep=self._pause)
            elif release is not None:
                persistently(
                    lambda: api.release(block.attempt_id, release), patience_s=_RELEASE_PATIENCE_S, sleep=time.sleep
                )
        except StaleLease as error:
            _log.warning("attempt %s does not count any more: %s", block.attempt_id, error)
        except (ApiUnreachable, ApiRefused) as error:
            kept = self._paths.root / block.attempt_id
            _log.error("attempt %s could not be handed in: %s; its receipts stay in %s", block.attempt_id, error, kept)

    def _pause(self, seconds: float) -> None:
        """Sleep between tries, and give up early when this worker has to go."""
        if self._stopping():
            raise ApiUnreachable("this worker was asked to stop while the service was away")
        self._bench.bell.wait(seconds)


def _release(block: ClaimedBlock, reason: StopReason) -> Release | None:
    if reason is StopReason.FENCED:
        return None
    if reason is StopReason.CANCELLED:
        return Release(token=block.token, failure_class=FailureClass.CANCELLED, message="the ablation was cancelled")
    return Release(token=block.token, failure_class=FailureClass.PREEMPTED, message="the worker was asked to stop")


def _drain(feed: BlockFeed, pulse: Pulse) -> None:
    """Send what is left of the logs by heartbeats: it may be more than fits into one message."""
    for _ in range(_LOG_DRAIN_BEATS):
        if not feed.chunks() or not pulse.beat():
            return


def _steps_total(trial: ClaimedTrial) -> int:
    return read_config(trial.config).steps.total


def _data_key(order: TrialOrder) -> str:
    config = read_config(order.config)
    return f"{config.data!r} {config.model.vocab_size}"
