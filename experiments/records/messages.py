"""Wire messages between service and workers, the only place where the two meet. All are JSON over HTTP."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from experiments.documents import Frozen, Number, Whole
from experiments.outcomes import FailureClass
from experiments.records.signing import PublicKey, Signature, block_statement
from experiments.retries import FINAL_WITH_RECEIPT

FencingToken = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{22}$", examples=["hZ3V5T8QW2R4Y6M9N0P1Sw"])]
"""128 random bits, URL-safe: whoever shows it was given the block."""


class DeviceInfo(Frozen):
    """One accelerator, or the CPU of a CPU node."""

    index: Whole
    name: str
    serial: str | None = None
    memory_bytes: Whole


MOST_DEVICES = 64
"""Devices of one node: it may hold as many blocks, so a worker must not call itself larger than any machine is."""


class DeviceHealth(StrEnum):
    """Whether a node can take a block, as far as it can tell itself."""

    OK = "ok"
    QUARANTINED = "quarantined"
    """It takes nothing: it cannot prove that its devices are free, or lacks what a trial needs."""


class NodeRegistration(Frozen):
    """`PUT /v1/nodes/{name}`: what a worker found when it probed its machine."""

    node_class: str
    devices: tuple[DeviceInfo, ...] = Field(max_length=MOST_DEVICES)
    versions: Mapping[str, str]
    code_digest: str
    lacks: tuple[str, ...] = ()
    """Human sentences about what the probe missed."""
    public_key: PublicKey | None = None
    """Key that the node signs its blocks with; None on an air-gapped node that cannot sign."""
    lanes: Mapping[str, str | None] | None = None
    """By lane: None when a small scan with its gradients ran and was right, else why not, in words. None as a
    whole: nobody tried."""
    device_state: DeviceHealth = DeviceHealth.OK
    device_reason: str | None = None
    """Why it is quarantined."""


class NodeRegistered(Frozen):
    """The service's answer to a registration."""

    node_id: str
    claim_poll_s: float
    """Poll at least this often even without a wake-up."""


class ClaimRequest(Frozen):
    """`POST /v1/blocks:claim`; 200 with a ClaimedBlock or 204 when nothing waits."""

    node_id: str
    device_state: DeviceHealth = DeviceHealth.OK
    """A quarantined node asks all the same, so that it is seen, and gets nothing."""
    device_reason: str | None = None


class ClaimedTrial(Frozen):
    """One arm of a claimed block, in running order."""

    trial_id: str
    arm: str
    role: str
    position: int
    arm_digest: str
    gates: Mapping[str, Any]
    config: Mapping[str, Any]
    """TrainConfig as JSON, with the block's seed in it."""
    timeout_s: float
    final_failures: tuple[FailureClass, ...] = tuple(sorted(FINAL_WITH_RECEIPT))
    """Failure classes that are this arm's result by now: the trial gets a receipt that says so, and the block goes on.
    A trial that ends by any other class breaks its block."""


class ClaimedBlock(Frozen):
    """A block under a lease. Every later call carries `token`; any other gets 409."""

    attempt_id: str
    token: FencingToken
    attempt_no: int
    lease_s: float
    heartbeat_s: float
    ablation_id: str
    ablation_name: str
    block_id: str
    block_index: int
    """In the plan, from 0."""
    seed: int
    timed: bool
    """Whether times decide: what disturbs nothing but times (load, clocks, heat) spoils the block then only."""
    max_foreign_load: float
    """Share of the cores' time that others may take during a trial on the host, where times decide."""
    cold_caches: bool
    """Whether every trial starts with empty caches of compilers on disk: where compile time decides."""
    spec_digest: str
    rule_digest: str
    request_id: str | None = None
    """Of the request that submitted the ablation: the worker's log lines and calls carry it, too."""
    trials: tuple[ClaimedTrial, ...]


class TrialProgress(Frozen):
    """Where a trial is, for people who watch."""

    trial_id: str
    steps_done: Whole
    steps_total: Whole
    tokens_per_s: Number | None = None
    loss: Number | None = None
    step_s: Number | None = Field(default=None, ge=0)
    """Seconds of one of its steps of late; None until one has ended that compiles nothing."""
    over: bool = False
    """Whether its process has ended; its receipt comes with the block's."""


class LogChunk(Frozen):
    """A piece of a trial's log; a chunk at an offset already stored is ignored."""

    trial_id: str
    offset: Whole = Field(ge=0)
    """Absolute byte offset of the first byte of `text` encoded as UTF-8."""
    text: str


class Heartbeat(Frozen):
    """`POST /v1/attempts/{id}:heartbeat`."""

    token: FencingToken
    progress: tuple[TrialProgress, ...] = ()
    """Of the trials that there is something new about, and last of the one that runs."""
    logs: tuple[LogChunk, ...] = ()
    device_state: DeviceHealth = DeviceHealth.OK
    device_reason: str | None = None


class HeartbeatReply(Frozen):
    """Lease extended; `cancel` asks the worker to stop the trial and release the block."""

    lease_s: float
    cancel: bool


class BlockReport(Frozen):
    """`POST /v1/attempts/{id}:report`: the whole block at once, or why it broke."""

    token: FencingToken
    receipts: tuple[Mapping[str, Any], ...] = ()
    """Receipts as JSON, one for each trial; empty when the block broke."""
    logs: tuple[LogChunk, ...] = ()
    failure_class: FailureClass | None = None
    """Set when the block broke: it is discarded and rerun whole, or failed when its attempts are used up."""
    arm: str | None = None
    """The arm whose trial broke the block; None where it cannot be told."""
    message: str | None = None
    signature: Signature | None = None
    """Of the node, over `statement`."""

    def statement(self, block: ClaimedBlock) -> bytes:
        """Return what the node signs: whose block it is, the receipts' digests, and why it broke."""
        ids = {"ablation": block.ablation_id, "block": block.block_id, "attempt": block.attempt_id}
        broke = None
        if self.failure_class is not None:
            broke = self.model_dump(mode="json", exclude={"token", "receipts", "logs", "signature"})
        return block_statement(ids, [str(receipt.get("digest")) for receipt in self.receipts], broke)


class Release(Frozen):
    """`POST /v1/attempts/{id}:release`: give the block back without a result."""

    token: FencingToken
    failure_class: FailureClass
    message: str
