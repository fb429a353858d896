"""A thread that renews a block's lease, and sends progress and log text with every renewal."""

import logging
import threading
from contextvars import copy_context

from ablate.experiments.records.identity import ClaimedBlock
from ablate.experiments.records.messages import Heartbeat
from ablate.workers.devices.node_health import ReleaseProof, device_state
from ablate.workers.errors import ApiRefused, ApiUnreachable, StaleLease
from ablate.workers.lease import Lease, boot_time_s
from ablate.workers.leases.service_api import ServiceApi
from ablate.workers.processes.trial_output import BlockOutput
from ablate.workers.processes.wake_event import WakeEvent

_log = logging.getLogger(__name__)

_SHORTEST_TIMEOUT_S = 0.5


class LeaseRenewal:
    """Sends a heartbeat every `heartbeat_s` while the block runs; wakes the main thread when the trial has to stop."""

    def __init__(
        self,
        api: ServiceApi,
        block: ClaimedBlock,
        lease: Lease,
        *,
        output: BlockOutput,
        wake_event: WakeEvent,
        proof: ReleaseProof,
    ) -> None:
        self._api = api
        self._block = block
        self._lease = lease
        self._output = output
        self._wake_event = wake_event
        self._proof = proof
        self._timeout_s = max(_SHORTEST_TIMEOUT_S, block.lease_s / 3)
        self._over = threading.Event()
        run = copy_context().run  # with the id of the request that submitted the block
        self._thread = threading.Thread(
            target=run, args=(self._run,), name=f"heartbeat-{block.attempt_id}", daemon=True
        )

    def __enter__(self) -> "LeaseRenewal":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(self._lease.left_s() + 1.0)

    def send(self) -> bool:
        """Send one heartbeat; return whether the service accepted it."""
        chunks, progress = self._output.chunks(), self._output.unsent_progress()
        message = Heartbeat(
            token=self._block.token,
            progress=progress,
            logs=chunks,
            waits_for=self._output.waiting,
            device_state=device_state(self._proof.last),
            device_reason=self._proof.last,
        )
        sent_at = boot_time_s()
        try:
            reply = self._api.heartbeat(self._block.attempt_id, message, timeout_s=self._timeout_s)
        except StaleLease as error:
            _log.warning("attempt %s lost its lease: %s", self._block.attempt_id, error)
            self._lease.revoke()
            self._wake_event.set()
            return False
        except (ApiUnreachable, ApiRefused) as error:
            _log.warning("heartbeat of %s: %s; lease left %.1f s", self._block.attempt_id, error, self._lease.left_s())
            return False
        self._output.chunks_accepted(chunks)
        self._output.progress_accepted(progress)
        self._lease.renew(reply.lease_s, sent_at=sent_at)
        if reply.cancel:
            self._lease.cancel()
            self._wake_event.set()
        return True

    def _run(self) -> None:
        while not self._over.wait(self._block.heartbeat_s) and self._lease.reason() is None:
            try:
                self.send()
            except Exception:  # the thread's boundary: without it a block would lose its lease without a word
                _log.exception(
                    "heartbeat of %s failed; lease left %.1f s", self._block.attempt_id, self._lease.left_s()
                )
