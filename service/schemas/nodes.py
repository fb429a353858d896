"""Wire types of nodes, their signing keys, and answers to workers."""

from pydantic import Field

from ablate.experiments.outcomes import BlockState
from ablate.experiments.records.calibration import Calibration, Ledger
from ablate.experiments.records.messages import DeviceInfo
from ablate.experiments.records.signing import PublicKey
from ablate.service.schemas.public import INDEX, Public


class CalibrationPublic(Public):
    """Noise of one device and workload, from A/A blocks, and whether the calibration is valid."""

    calibration: Calibration
    problem: str | None
    """Why it is not valid now; None when it is."""
    mended_by: str | None
    """The command that renews it; None when it is valid."""


class CalibrationList(Public):
    """Every calibration, newest last, and the ledger of A/A verdicts."""

    items: list[CalibrationPublic]
    ledger: Ledger
    statement: str
    """The conclusion from the ledger in one sentence."""


class AttemptClosed(Public):
    """The answer to a report."""

    attempt_id: str
    block_id: str
    block_state: BlockState


class NodeRuns(Public):
    """A running block of a node."""

    ablation: str
    name: str
    block_index: int = Field(description=INDEX)
    devices: int
    """Devices that the block occupies."""
    arms: list[str]
    """Arms of the running trials; empty between two trials."""


class NodePublic(Public):
    """A node in its current state."""

    id: str
    name: str
    node_class: str
    health: str
    """`live`, or `silent` after no call for longer than a lease."""
    state: str
    """`works`; `draining`, `drained` or `quarantined`: it gets no block until an operator resumes it; `revoked`."""
    quarantined_reason: str | None
    stopped_by: str | None
    stopped_at: str | None
    probe_began_at: str | None = None
    """When the node began to probe itself; null unless it does so now."""
    probe_at: str | None = None
    """When the node probes itself next; it works again if a probe passes. Null unless it is quarantined, and if a
    person has stopped it."""
    lanes: dict[str, str | None] | None
    """Results of its lane check: null for a lane that ran, else the reason; null without a check."""
    devices: list[DeviceInfo]
    devices_free: int
    """Devices that no running block occupies."""
    versions: dict[str, str]
    code_digest: str
    lacks: list[str]
    public_key: str | None
    allocation: str | None = None
    """The job of a cluster that started the worker of an enrolled node; the node leaves the list with it."""
    cores: int | None = None
    """Number of cores that its worker may use; null until a worker of this version registers."""
    registered_at: str
    seen_at: str
    runs: list[NodeRuns]
    """At most one for each of its devices."""


class NodeList(Public):
    """Every node."""

    items: list[NodePublic]


class WaitingPublic(Public):
    """Work of one node class, number of devices and number of nodes that waits in the queue."""

    node_class: str
    devices: int
    """Devices of each node that a block uses together."""
    nodes_each: int = 1
    """Nodes of an allocation over which one trial runs."""
    blocks: int
    device_minutes: float
    """Expected of these blocks: by the mean time of their ablation's finished ones, before the first by the newest
    trials of the node class, without any by their limit."""
    least_s: float
    """Seconds that a worker must have left to get one of these blocks: by the mean time of its ablation's finished
    ones, before the first by its limit."""
    nodes: int
    """Nodes that may run one of them now, busy ones included; stopped and silent ones are not among them."""


class WaitingList(Public):
    """The work that waits, by node class and numbers of devices and nodes; empty if nothing waits."""

    items: list[WaitingPublic]


class KeyPublic(Public):
    """A signing key of a node."""

    key: PublicKey
    node: str
    trusted_by: str
    trusted_at: str
    revoked_at: str | None
    reason: str | None


class KeyList(Public):
    """Every key, by node."""

    items: list[KeyPublic]
