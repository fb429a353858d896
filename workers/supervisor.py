"""Claim blocks, run their trials one after another, report. The whole life of a worker between its two signals."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from experiments.outcomes import FailureClass
from experiments.records.messages import BlockReport, ClaimedBlock, Release
from experiments.runtime.logs import requested_by
from workers.blocks import BlockRunner, NodeContext
from workers.errors import ApiRefused, ApiUnreachable, BlockBroken, BlockStopped, StaleLease
from workers.heartbeat import LeaseRenewal
from workers.lease import Lease, StopReason
from workers.service_api import ServiceApi, persistently
from workers.trial_output import BlockOutput
from workers.wake_event import WakeEvent

_log = logging.getLogger(__name__)

_REPORT_PATIENCE_LEASES = 10
"""Leases to go on trying to hand in a finished block: its token, not its lease, decides whether it still counts."""

_RELEASE_PATIENCE_S = 3.0
_LOG_DRAIN_BEATS = 200
_MESSAGE_LIMIT = 2000  # characters


@dataclass(frozen=True, kw_only=True)
class ServiceLink:
    """How a worker talks to its service."""

    api: ServiceApi
    wake_event: WakeEvent
    poll_s: float
    """Ask for work at least this often."""
    keep_attempts: int
    """Attempt folders to keep on disk."""


class Supervisor:
    """The loop: wait for a wake-up or the poll interval, claim until nothing waits, run what was claimed."""

    def __init__(self, context: NodeContext, link: ServiceLink, *, stopping: Callable[[], bool]) -> None:
        self._context = context
        self._link = link
        self._stopping = stopping
        self._runner = BlockRunner(context)

    def run(self) -> None:
        """Serve until asked to stop."""
        while not self._stopping():
            asked_at = time.monotonic()
            block = self._claim()
            if block is None:
                self._link.wake_event.wait(self._link.poll_s)
                continue
            self._context.paths.clean(keep=self._link.keep_attempts - 1)
            with requested_by(block.request_id):
                self.run_block(block, asked_at=asked_at)

    def run_block(self, block: ClaimedBlock, *, asked_at: float) -> None:
        """Run one claimed block to its report, its release, or, when the lease is lost, to nothing."""
        _log.info("block %s: attempt %d, %d trials", block.block_id, block.attempt_no, len(block.trials))
        lease = Lease(block.lease_s, asked_at=asked_at)
        output = BlockOutput()
        with LeaseRenewal(self._link.api, block, lease, output=output, wake_event=self._link.wake_event) as renewal:
            report, release = self._measure(block, lease, output)
            if report is not None or release is not None:
                _drain(output, renewal)
        self._hand_in(block, report, release, output)

    def _measure(
        self, block: ClaimedBlock, lease: Lease, output: BlockOutput
    ) -> tuple[BlockReport | None, Release | None]:
        """Return the block's report, or its release, or neither when the lease is lost."""
        try:
            receipts = self._runner.run(block, lease, output)
        except BlockBroken as broken:
            _log.warning("block %s is broken: %s", block.block_id, broken.message)
            return _broken_report(block, broken), None
        except BlockStopped as stopped:
            _log.warning("block %s was stopped: %s", block.block_id, stopped.reason)
            return None, _release(block, stopped.reason)
        except Exception as error:  # the task boundary: the report records it
            _log.exception("block %s: this worker failed", block.block_id)
            message = f"the worker failed: {type(error).__name__}: {error}"[:_MESSAGE_LIMIT]
            return BlockReport(token=block.token, failure_class=FailureClass.INFRA_NODE, message=message), None
        return BlockReport(token=block.token, receipts=tuple(r.model_dump(mode="json") for r in receipts)), None

    def _claim(self) -> ClaimedBlock | None:
        problem = self._runner.quarantine
        if problem is not None:
            _log.error("this node claims nothing any more: %s; restart the worker when it is repaired", problem)
            return None
        try:
            return self._link.api.claim(self._context.node_id)
        except ApiUnreachable as error:
            _log.warning("claim: %s", error)
        except StaleLease as error:
            _log.warning("claim refused: %s", error)
        return None

    def _hand_in(
        self, block: ClaimedBlock, report: BlockReport | None, release: Release | None, output: BlockOutput
    ) -> None:
        """Report or release; a refused token means that the block is somebody else's by now."""
        api = self._link.api
        try:
            if report is not None:
                whole = self._signed(block, report).model_copy(update={"logs": output.chunks()})
                patience = _REPORT_PATIENCE_LEASES * block.lease_s
                persistently(lambda: api.report(block.attempt_id, whole), patience_s=patience, sleep=self._pause)
            elif release is not None:
                persistently(
                    lambda: api.release(block.attempt_id, release), patience_s=_RELEASE_PATIENCE_S, sleep=time.sleep
                )
        except StaleLease as error:
            _log.warning("attempt %s does not count any more: %s", block.attempt_id, error)
        except (ApiUnreachable, ApiRefused) as error:
            kept = self._context.paths.root / block.attempt_id
            _log.error("attempt %s could not be handed in: %s; its receipts stay in %s", block.attempt_id, error, kept)

    def _signed(self, block: ClaimedBlock, report: BlockReport) -> BlockReport:
        signer = self._context.signer
        return (
            report if signer is None else report.model_copy(update={"signature": signer.sign(report.statement(block))})
        )

    def _pause(self, seconds: float) -> None:
        """Sleep between tries, and give up early when this worker has to go."""
        if self._stopping():
            raise ApiUnreachable("this worker was asked to stop while the service was away")
        self._link.wake_event.wait(seconds)


def _broken_report(block: ClaimedBlock, broken: BlockBroken) -> BlockReport:
    return BlockReport(
        token=block.token, failure_class=broken.failure_class, arm=broken.arm, message=broken.message[:_MESSAGE_LIMIT]
    )


def _release(block: ClaimedBlock, reason: StopReason) -> Release | None:
    if reason is StopReason.FENCED:
        return None
    if reason is StopReason.CANCELLED:
        return Release(token=block.token, failure_class=FailureClass.CANCELLED, message="the ablation was cancelled")
    return Release(token=block.token, failure_class=FailureClass.PREEMPTED, message="the worker was asked to stop")


def _drain(output: BlockOutput, renewal: LeaseRenewal) -> None:
    """Send what is left of the logs by heartbeats: it may be more than fits into one message."""
    for _ in range(_LOG_DRAIN_BEATS):
        if not output.chunks() or not renewal.send():
            return
