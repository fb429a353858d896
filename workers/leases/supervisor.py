"""Claim blocks, run their trials one after another, report. The whole life of a worker between its two signals."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from experiments.outcomes import FailureClass
from experiments.records.messages import BlockReport, ClaimedBlock, Release
from experiments.runtime.logs import requested_by
from workers.blocks import BlockRunner, NodeContext
from workers.errors import ApiRefused, ApiUnreachable, BlockBroken, BlockStopped, StaleLease
from workers.lease import Lease, StopReason, boot_time_s
from workers.leases.heartbeat import LeaseRenewal
from workers.leases.service_api import ServiceApi, persistently
from workers.leases.service_node import ServiceNode
from workers.leases.spool import Spool
from workers.processes.trial_output import BlockOutput
from workers.processes.wake_event import WakeEvent

_log = logging.getLogger(__name__)

_PATIENCE_S = 3.0
"""To go on trying at once; a report is kept and sent again later, a block that is not given back expires."""
_UNKEPT_PATIENCE_LEASES = 10
"""The same for a report that cannot be kept on disk."""
_LOG_DRAIN_BEATS = 200
_MESSAGE_LIMIT = 2000  # characters


@dataclass(frozen=True, kw_only=True)
class ServiceLink:
    """How a worker talks to its service."""

    api: ServiceApi
    node: ServiceNode
    spool: Spool
    wake_event: WakeEvent
    poll_s: float
    """Ask for work at least this often."""
    keep_attempts: int
    """Attempt folders to keep on disk."""


class Supervisor:
    """The loop: hand in what is finished, claim until nothing waits, run what was claimed, wait."""

    def __init__(self, context: NodeContext, link: ServiceLink, *, stopping: Callable[[], bool]) -> None:
        self._context = context
        self._link = link
        self._stopping = stopping
        self._runner = BlockRunner(context)
        self._said = ""

    def run(self) -> None:
        """Serve until asked to stop."""
        while not self._stopping():
            asked_at = boot_time_s()
            block = self._next()
            if block is None:
                self._link.wake_event.wait(self._link.poll_s)
                continue
            self._context.paths.clean(keep=self._link.keep_attempts - 1)
            with requested_by(block.request_id):
                self.run_block(block, asked_at=asked_at)

    def _next(self) -> ClaimedBlock | None:
        """Hand in what is kept, then claim; None when there is nothing to run now."""
        try:
            self._link.spool.send_all(self._link.api.report)
            self._context.runner.check_guardian()
            block = self._link.node.claim()
        except (ApiUnreachable, StaleLease, OSError) as error:
            self._say(f"no claim: {error}")
            return None
        self._say("")
        if block is not None and self._link.node.problem is not None:
            why = _because(block, FailureClass.INFRA_NODE, self._link.node.problem)
            self._give_back(block, Release.model_validate(why))
            return None
        return block

    def run_block(self, block: ClaimedBlock, *, asked_at: float) -> None:
        """Run one claimed block to its report, its release, or, when the lease is lost, to nothing."""
        _log.info("block %s: attempt %d, %d trials", block.block_id, block.attempt_no, len(block.trials))
        self._runner.node_id = self._link.node.id
        lease = Lease(block.lease_s, asked_at=asked_at, tell=self._context.runner.guard_until)
        output = BlockOutput()
        renewal = LeaseRenewal(
            self._link.api, block, lease, output=output, wake_event=self._link.wake_event, proof=self._context.proof
        )
        with renewal:
            report, release = self._measure(block, lease, output)
            if report is not None or release is not None:
                _drain(output, renewal)
        self._context.runner.guard_until(math.inf)
        if report is not None:
            self._hand_in(block, self._signed(block, report).model_copy(update={"logs": output.chunks()}))
        elif release is not None:
            self._give_back(block, release)

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
            message = f"the worker failed: {type(error).__name__}: {error}"
            return BlockReport.model_validate(_because(block, FailureClass.INFRA_NODE, message)), None
        return BlockReport(token=block.token, receipts=tuple(r.model_dump(mode="json") for r in receipts)), None

    def _hand_in(self, block: ClaimedBlock, report: BlockReport) -> None:
        """Keep a report on disk and send it; one that cannot be sent now is sent before the next claims."""
        api, spool = self._link.api, self._link.spool
        try:
            spool.keep(block.attempt_id, report)
        except OSError as error:
            _log.error("attempt %s cannot be kept on disk (%s); it is sent or lost", block.attempt_id, error)
            self._send(lambda: api.report(block.attempt_id, report), _UNKEPT_PATIENCE_LEASES * block.lease_s)
        else:
            self._send(lambda: spool.send_all(api.report), _PATIENCE_S)

    def _give_back(self, block: ClaimedBlock, release: Release) -> None:
        self._send(lambda: self._link.api.release(block.attempt_id, release), _PATIENCE_S)

    def _send(self, call: Callable[[], None], patience_s: float) -> None:
        """Send now; a refused token means that the block is somebody else's by now."""
        try:
            persistently(call, patience_s=patience_s, sleep=time.sleep)
        except (ApiUnreachable, ApiRefused, StaleLease) as error:
            _log.warning("%s", error)

    def _signed(self, block: ClaimedBlock, report: BlockReport) -> BlockReport:
        signer = self._context.signer
        return (
            report if signer is None else report.model_copy(update={"signature": signer.sign(report.statement(block))})
        )

    def _say(self, sentence: str) -> None:
        """Log what is new."""
        if sentence and sentence != self._said:
            _log.warning("%s", sentence)
        self._said = sentence


def _because(block: ClaimedBlock, failure: FailureClass, message: str) -> dict[str, object]:
    return {"token": block.token, "failure_class": failure, "message": message[:_MESSAGE_LIMIT]}


def _broken_report(block: ClaimedBlock, broken: BlockBroken) -> BlockReport:
    return BlockReport.model_validate({"arm": broken.arm, **_because(block, broken.failure_class, broken.message)})


def _release(block: ClaimedBlock, reason: StopReason) -> Release | None:
    if reason is StopReason.FENCED:
        return None
    if reason is StopReason.CANCELLED:
        return Release.model_validate(_because(block, FailureClass.CANCELLED, "the ablation was cancelled"))
    return Release.model_validate(_because(block, FailureClass.PREEMPTED, "the worker was asked to stop"))


def _drain(output: BlockOutput, renewal: LeaseRenewal) -> None:
    """Send what is left of the logs by heartbeats: it may be more than fits into one message."""
    for _ in range(_LOG_DRAIN_BEATS):
        if not output.chunks() or not renewal.send():
            return
