"""Wire messages between service and workers, JSON over HTTP; claims and reports of blocks are in `identity`."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, Field, StrictBool

from ablate.experiments.documents import Frozen, Number, Whole
from ablate.experiments.ids import NODE_NAME
from ablate.experiments.records.signing import PublicKey
from ablate.model.measurements import OmitNone

PROBLEM_TYPES = "urn:ablate:problem:"
"""Begin of the types of the service's own problem documents; an error without one comes from a proxy."""

FencingToken = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{22}$", examples=["hZ3V5T8QW2R4Y6M9N0P1Sw"])]
"""128 random bits, URL-safe; proves that the sender holds the block."""


class DeviceInfo(Frozen):
    """One accelerator, or the CPU of a CPU node."""

    index: Whole
    name: str
    serial: str | None = None
    memory_bytes: Whole
    capability: OmitNone[str] = None
    """Compute capability of a GPU, such as 9.0 or gfx942."""


MOST_DEVICES = 64
"""Most devices of one node, which is also the most blocks that it may hold."""


class DeviceHealth(StrEnum):
    """Whether a node can take a block, by its own checks."""

    OK = "ok"
    QUARANTINED = "quarantined"
    """It takes no block: it cannot prove that its devices are free, or something that trials need is missing."""


class NodeRegistration(Frozen):
    """`PUT /v1/nodes/{name}`: a worker's description of its machine."""

    node_class: str
    devices: tuple[DeviceInfo, ...] = Field(max_length=MOST_DEVICES)
    versions: Mapping[str, str]
    code_digest: str
    lacks: tuple[str, ...] = ()
    """Sentences about missing parts of the machine."""
    public_key: PublicKey | None = None
    """Key that the node signs with; None on an air-gapped node that cannot sign."""
    lanes: Mapping[str, str | None] | None = None
    """By lane: None when a small scan with gradients gave correct results, else the reason in words. None as a whole
    when no lane was tried."""
    device_state: DeviceHealth = DeviceHealth.OK
    device_reason: str | None = None
    """Why it is quarantined."""
    probed: StrictBool = False
    """Whether the node has just probed itself: its lanes, its devices and its disk."""
    allocation: OmitNone[Annotated[str, Field(pattern=NODE_NAME)]] = None
    """The job of a cluster that started the worker of an enrolled node; the node leaves with it."""
    cores: OmitNone[Annotated[int, Field(ge=1, strict=True)]] = None
    """Number of cores that the worker may use."""


class Enrolment(Frozen):
    """`POST /v1/nodes/{name}:enrol`: a worker without a key offers one for a new node, with an enrolment token."""

    node_class: str
    key_digest: str = Field(pattern="^sha256:[0-9a-f]{64}$")
    """Of the key, a bearer token that the worker made and keeps."""


class NodeRegistered(Frozen):
    """The service's answer to a registration."""

    node_id: str
    claim_poll_s: float
    """Longest time between two polls, also without a wake-up."""


PREPARATION_LIMIT_S = 3600.0
"""Time that a node may take to prepare the data of a block, beside the limits of its trials."""


class ClaimRequest(Frozen):
    """`POST /v1/blocks:claim`; 200 with a ClaimedBlock, 202 with a ProbeOrder, or 204 when no block waits."""

    node_id: str
    device_state: DeviceHealth = DeviceHealth.OK
    """A quarantined node also polls, so that the service sees it, and gets no block."""
    device_reason: str | None = None
    claim_id: FencingToken | None = None
    """Random id of this claim. If its answer was lost, a claim with the same id returns the same attempt. None: a lost
    answer costs a lease."""
    left_s: Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)] | None = None
    """Seconds until the worker ends by itself, None if it stays. It gets no block that should take longer: by the mean
    time of its ablation's finished blocks, before the first by its limit."""


class ProbeOrder(Frozen):
    """The answer to the claim of a quarantined node that is to probe itself now; its next registration is `probed`."""

    probe: Literal[True] = True


MOST_FAILURE = 2000
"""Most characters of the reason why a trial that ended has no measurement."""


class TrialProgress(Frozen):
    """Progress of a trial, for people who watch."""

    trial_id: str
    steps_done: Whole = Field(lt=2**31)
    steps_total: Whole = Field(lt=2**31)
    tokens_per_s: Number | None = Field(default=None, allow_inf_nan=False)
    loss: Number | None = Field(default=None, allow_inf_nan=False)
    step_s: Number | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Seconds of a recent step; None until a step without compilation has ended."""
    over: bool = False
    """Whether its process has ended; the receipt comes with the block's report."""
    failure: str | None = Field(default=None, max_length=MOST_FAILURE)
    """Class and message of a trial that ended without a measurement."""


class LogChunk(Frozen):
    """A piece of a trial's log; the service ignores a chunk at a stored offset."""

    trial_id: str
    offset: Whole = Field(ge=0)
    """Absolute byte offset of the first byte of `text` encoded as UTF-8."""
    text: str


MOST_WAITING = 500
"""Most characters of the reason why a block waits on its node."""


class Heartbeat(Frozen):
    """`POST /v1/attempts/{id}:heartbeat`."""

    token: FencingToken
    progress: tuple[TrialProgress, ...] = ()
    """Of the trials with news; the running trial last."""
    logs: tuple[LogChunk, ...] = ()
    device_state: DeviceHealth = DeviceHealth.OK
    device_reason: str | None = None
    waits_for: str | None = Field(default=None, max_length=MOST_WAITING)
    """What the block waits for on its node, such as quiet cores; None while a trial runs."""


class HeartbeatReply(Frozen):
    """Lease extended; `cancel` asks the worker to stop the trial and give the block back."""

    lease_s: float
    cancel: bool


class AttemptEnded(BaseModel):
    """The part of the service's answer to a report that a worker reads."""

    attempt_id: str
