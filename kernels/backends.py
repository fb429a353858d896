"""Lanes and node classes: which implementation family runs where. Torch-free, importable by the service.

A *lane* is one implementation family of an operation. Asking for one that a node class does not have is refused with
the reason below, never replaced silently.
"""

from enum import StrEnum


class Lane(StrEnum):
    """One implementation family of an operation."""

    REFERENCE = "reference"
    CUDA = "cuda"
    XLA = "xla"
    PEER = "peer"


class NodeClass(StrEnum):
    """A kind of machine that a spec can ask for."""

    CPU = "cpu"
    H200 = "h200"
    TPU_V6E = "tpu-v6e"


LANES_ON: dict[NodeClass, tuple[Lane, ...]] = {
    NodeClass.CPU: (Lane.REFERENCE,),
    NodeClass.H200: (Lane.CUDA, Lane.PEER, Lane.REFERENCE),
    NodeClass.TPU_V6E: (),
}
"""Lanes that have an implementation on each node class, best first."""


def lane_refusal(lane: Lane, node_class: NodeClass) -> str | None:
    """Return why `lane` cannot run on `node_class`, or None when it can."""
    if lane in LANES_ON[node_class]:
        return None
    known = ", ".join(LANES_ON[node_class]) or "none yet"
    return f"lane '{lane}' has no implementation on node class '{node_class}'; implemented there: {known}"
