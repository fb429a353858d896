"""The main loop of a worker: claim blocks, run their trials, report."""

import logging
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.identity import BlockReport, ClaimedBlock
from ablate.experiments.records.messages import ClaimRequest, NodeRegistered, ProbeOrder
from ablate.experiments.reporting.wording import counted
from ablate.experiments.system.logs import requested_by
from ablate.workers.blocks.block_runner import BlockRunner, NodeContext
from ablate.workers.devices.node_health import NodeHealth, device_state
from ablate.workers.errors import ApiRefused, ApiUnreachable, BlockBroken, BlockStopped, SoftwareChanged, StaleLease
from ablate.workers.lease import Lease, StopReason, boot_time_s
from ablate.workers.leases.heartbeat import LeaseRenewal
from ablate.workers.leases.service_api import ServiceApi, persistently
from ablate.workers.leases.spool import Spool
from ablate.workers.node import Node
from ablate.workers.processes.lanes import LaneResults
from ablate.workers.processes.trial_output import BlockOutput
from ablate.workers.processes.wake_event import StopFlag, WakeEvent
from ablate.workers.trials.failures import MESSAGE_LIMIT

_log = logging.getLogger(__name__)

_PATIENCE_S = 3.0
"""Time for immediate retries. Later, a report is sent again from the spool."""
_UNSPOOLED_PATIENCE_LEASES = 10
"""The same for a result that cannot be written to disk."""
_GIVEN_BACK = (FailureClass.CANCELLED, FailureClass.PREEMPTED)
"""Ends of a block that the worker did not have to the end; without a report its lease expires."""
_LOG_DRAIN_BEATS = 200
KEEP_BYTES = 10 * 2**30
"""Most disk space of the folders of earlier attempts."""
_SOFTWARE_CHECK_EVERY_S = 5.0


class ServiceNode:
    """Registers this node and claims blocks; every message contains the state of the devices."""

    def __init__(
        self,
        api: ServiceApi,
        node: Node,
        health: NodeHealth,
        *,
        public_key: str | None,
        test_lanes: Callable[[], LaneResults | None],
        left_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """Answer an order to probe with `test_lanes`, which runs every lane anew.

        `left_s` returns the seconds until this worker ends by itself.
        """
        self._api = api
        self._left_s = left_s
        self._test_lanes = test_lanes
        self._node = node
        self._health = health
        self._public_key = public_key
        self.id = ""
        """From the service; empty before the first registration."""
        self._claim_id: str | None = None
        """Of the claim that has no answer yet."""
        self.problem: str | None = None
        """Why this node takes no block, at the last check."""

    def register(self, *, probed: bool = False) -> NodeRegistered:
        """Register this node with the state of its devices and lanes."""
        self._check()
        registration = self._node.registration(self._public_key).model_copy(
            update={
                "lanes": self._health.lanes,
                "device_state": device_state(self.problem),
                "device_reason": self.problem,
                "probed": probed,
            }
        )
        registered = self._api.register(self._node.name, registration)
        self.id = registered.node_id
        return registered

    def claim(self) -> ClaimedBlock | None:
        """Claim a block; register again if the service lost this node, for example by a restore of its database.

        A node that is to probe itself does so instead.
        """
        try:
            answer = self._claim()
        except ApiRefused as error:
            if error.status != httpx.codes.NOT_FOUND:
                raise
            self.register()
            _log.warning("the service did not know this node, which is now registered again as %s", self.id)
            answer = self._claim()
        if not isinstance(answer, ProbeOrder):
            return answer
        self._probe()
        return None

    def _probe(self) -> None:
        """Test every lane, the devices and the disk, and register with the results."""
        _log.warning("this node is quarantined and probes itself now")
        self._health.renew(self._test_lanes())
        self.register(probed=True)
        _log.warning("the probe %s", "has passed" if self.problem is None else f"has failed: {self.problem}")

    def _claim(self) -> ClaimedBlock | ProbeOrder | None:
        """Claim a block; if the answer to the last claim was lost, repeat that claim, so that its block is not lost."""
        self._check()
        self._claim_id = self._claim_id or secrets.token_urlsafe(16)
        request = ClaimRequest(
            node_id=self.id,
            device_state=device_state(self.problem),
            device_reason=self.problem,
            claim_id=self._claim_id,
            left_s=None if math.isinf(left_s := self._left_s()) else left_s,
        )
        try:
            block = self._api.claim(request)
        except (ApiRefused, StaleLease):
            self._claim_id = None
            raise
        self._claim_id = None
        return block

    def _check(self) -> None:
        before, self.problem = self.problem, self._health.problem()
        if self.problem != before:
            _log.error("takes no block: %s", self.problem) if self.problem else _log.warning("takes blocks again")


@dataclass(frozen=True, kw_only=True)
class ServiceLink:
    """The connection of a worker to its service."""

    api: ServiceApi
    node: ServiceNode
    spool: Spool
    wake_event: WakeEvent
    poll_s: float
    """Longest pause between two claims."""
    keep_attempts: int
    """Attempt folders to keep on disk."""
    most_blocks: int | None = None
    """Blocks to report before the end; None for any number."""


class Supervisor:
    """The loop: send spooled reports, claim and run blocks while there are any, wait."""

    def __init__(self, context: NodeContext, link: ServiceLink, *, stopping: StopFlag) -> None:
        self._context = context
        self._link = link
        self._stopping = stopping
        self._runner = BlockRunner(context)
        self._last_warning = ""
        self._next_software_check_at = 0.0
        self._num_reported = 0

    def run(self) -> None:
        """Serve until this worker has to end. Raises SoftwareChanged, after which a new worker has to start."""
        self._stopping.ended()
        while (reason := self._end_reason()) is None:
            self._check_software()
            sent_at = boot_time_s()
            block = self._next()
            if block is None:
                self._link.wake_event.wait(min(self._link.poll_s, self._stopping.left_s()))
                continue
            self._context.paths.clean(keep=self._link.keep_attempts - 1, most_bytes=KEEP_BYTES)
            with requested_by(block.request_id):
                self.run_block(block, sent_at=sent_at)
            self._stopping.ended()
            self._next_software_check_at = 0.0
        _log.info("this worker ends: %s", reason)

    def _end_reason(self) -> str | None:
        if self._has_enough and not self._link.spool.waiting():
            return f"it has reported {counted(self._num_reported, 'block')}"
        return self._stopping.reason

    @property
    def _has_enough(self) -> bool:
        """Whether this worker must claim no other block."""
        return self._link.most_blocks is not None and self._num_reported >= self._link.most_blocks

    def _check_software(self) -> None:
        if boot_time_s() < self._next_software_check_at:
            return
        changed = self._context.node.changed()
        if changed is not None:
            raise SoftwareChanged(changed)
        self._next_software_check_at = boot_time_s() + _SOFTWARE_CHECK_EVERY_S

    def _next(self) -> ClaimedBlock | None:
        """Send spooled reports, then claim; return None when there is nothing to run now."""
        try:
            self._link.spool.send_all(self._link.api.report)
            self._context.runner.guardian.check()
            block = None if self._has_enough else self._link.node.claim()
        except (ApiUnreachable, StaleLease, OSError) as error:
            warning = f"no claim: {error}"
            if warning != self._last_warning:
                _log.warning("%s", warning)
            self._last_warning = warning
            return None
        self._last_warning = ""
        if block is not None and self._link.node.problem is not None:
            self._hand_in(block, self._signed(block, _without(block, FailureClass.INFRA_NODE, self._link.node.problem)))
            return None
        return block

    def run_block(self, block: ClaimedBlock, *, sent_at: float) -> None:
        """Run a block that was claimed at `sent_at`; report it, or drop it if its lease is lost."""
        _log.info("block %s: attempt %d, %d trials", block.block_id, block.attempt_no, len(block.trials))
        self._stopping.begins(block.expected_s)
        self._runner.node_id = self._link.node.id
        lease = Lease(block.lease_s, sent_at=sent_at, on_deadline=self._context.runner.guardian.until)
        output = BlockOutput()
        renewal = LeaseRenewal(
            self._link.api, block, lease, output=output, wake_event=self._link.wake_event, proof=self._context.proof
        )
        with renewal:
            report = self._measure(block, lease, output)
            if report is not None:
                report = self._signed(block, report)
                self._keep(block, report)  # before the log, which may take long
                _drain(output, renewal)
        self._context.runner.guardian.until(math.inf)
        if report is not None:
            self._hand_in(block, report.model_copy(update={"logs": output.chunks()}))
            self._num_reported += report.failure_class not in _GIVEN_BACK

    def _measure(self, block: ClaimedBlock, lease: Lease, output: BlockOutput) -> BlockReport | None:
        """Run the block; return its report, None when the lease is lost."""
        try:
            receipts = self._runner.run(block, lease, output)
        except BlockBroken as broken:
            _log.warning("block %s is broken: %s", block.block_id, broken.message)
            return _without(block, broken.failure_class, broken.message, arm=broken.arm)
        except BlockStopped as stopped:
            _log.warning("block %s was stopped: %s", block.block_id, stopped.reason)
            if stopped.reason is StopReason.FENCED:
                return None
            if stopped.reason is StopReason.CANCELLED:
                return _without(block, FailureClass.CANCELLED, "the ablation was cancelled")
            return _without(block, FailureClass.PREEMPTED, "the worker had to stop")
        except Exception as error:  # the task boundary: the report records it
            return self._failed(block, error, output)
        return BlockReport(token=block.token, receipts=tuple(r.model_dump(mode="json") for r in receipts))

    def _failed(self, block: ClaimedBlock, error: Exception, output: BlockOutput) -> BlockReport:
        """Return the report of a block whose worker's processes end, or of any other failure of ours."""
        if self._stopping.told_soon():
            return _without(block, FailureClass.PREEMPTED, "the worker had to stop, and a process of it had ended")
        _log.exception("block %s: this worker failed", block.block_id)
        message = f"the worker failed: {type(error).__name__}: {error}"
        arm = next((trial.arm for trial in block.trials if trial.trial_id == output.running), None)
        return _without(block, FailureClass.INFRA_NODE, message, arm=arm)

    def _hand_in(self, block: ClaimedBlock, report: BlockReport) -> None:
        """Write a report to disk and send it; if that fails now, it is sent before the next claims."""
        api, spool = self._link.api, self._link.spool
        if self._keep(block, report):
            self._send(lambda: spool.send_all(api.report), _PATIENCE_S)
        else:
            is_result = report.failure_class not in _GIVEN_BACK
            patience_s = _UNSPOOLED_PATIENCE_LEASES * block.lease_s if is_result else _PATIENCE_S
            self._send(lambda: api.report(block.attempt_id, report), patience_s)

    def _keep(self, block: ClaimedBlock, report: BlockReport) -> bool:
        """Write a report to disk; return whether that was possible."""
        try:
            self._link.spool.keep(block.attempt_id, report)
        except OSError as error:
            _log.error("cannot write attempt %s to disk (%s): it is sent or lost", block.attempt_id, error)
            return False
        return True

    def _send(self, call: Callable[[], None], patience_s: float) -> None:
        """Send now; after a StaleLease another attempt owns the block."""
        try:
            persistently(call, patience_s=patience_s, sleep=time.sleep)
        except (ApiUnreachable, ApiRefused, StaleLease) as error:
            _log.warning("%s", error)

    def _signed(self, block: ClaimedBlock, report: BlockReport) -> BlockReport:
        signer = self._context.signer
        if signer is None:
            return report
        return report.model_copy(update={"signature": signer.sign(report.statement(block))})


def _without(block: ClaimedBlock, failure: FailureClass, message: str, *, arm: str | None = None) -> BlockReport:
    """Return the report of a block without a result."""
    return BlockReport(token=block.token, failure_class=failure, arm=arm, message=message[:MESSAGE_LIMIT])


def _drain(output: BlockOutput, renewal: LeaseRenewal) -> None:
    """Send the remaining log text by heartbeats, since one message may be too small for it."""
    for _ in range(_LOG_DRAIN_BEATS):
        if not output.chunks() or not renewal.send():
            return
