"""Nodes and the keys that they sign with."""

from pydantic import Field

from experiments.records.messages import DeviceInfo
from experiments.records.signing import PublicKey
from service.schemas.public import INDEX, Public


class NodeRuns(Public):
    """A block that a node runs."""

    ablation: str
    name: str
    block_index: int = Field(description=INDEX)
    arms: list[str]
    """Of the trials that run; none between two."""


class NodePublic(Public):
    """A node as it stands."""

    id: str
    name: str
    node_class: str
    health: str
    """`live`, or `silent` when it has not been heard for longer than a lease."""
    state: str
    """`works`; `draining` and then `drained`, or `quarantined`: it gets no block until an operator resumes it;
    `revoked`: it has no key any more."""
    quarantined_reason: str | None
    stopped_by: str | None
    stopped_at: str | None
    lanes: dict[str, str | None] | None
    """What its check of the lanes found: null for a lane that ran, else why it did not; null when none was made."""
    devices: list[DeviceInfo]
    versions: dict[str, str]
    code_digest: str
    lacks: list[str]
    public_key: str | None
    registered_at: str
    seen_at: str
    runs: list[NodeRuns]
    """At most one for each of its devices."""


class NodeList(Public):
    """Every node."""

    items: list[NodePublic]


class KeyPublic(Public):
    """A key that a node signs with."""

    key: PublicKey
    node: str
    trusted_by: str
    trusted_at: str
    revoked_at: str | None
    reason: str | None


class KeyList(Public):
    """Every key, by node."""

    items: list[KeyPublic]
