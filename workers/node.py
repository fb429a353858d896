"""This node as its receipts and its registration describe it: probed once, when the worker starts."""

from dataclasses import dataclass

from experiments.records.messages import NodeRegistration
from kernels.backends import NodeClass
from workers import devices, environment
from workers.devices import Devices
from workers.environment import CodeState


@dataclass(frozen=True, kw_only=True)
class Node:
    """Everything about this machine that does not change while the worker runs."""

    name: str
    devices: Devices
    code: CodeState
    versions: dict[str, str]
    cores: int
    memory_limit_bytes: int
    lacks: tuple[str, ...]

    @property
    def node_class(self) -> NodeClass:
        """Class under which this node asks for work."""
        return self.devices.node_class

    @property
    def trial_memory_limit_bytes(self) -> int:
        """Memory that a trial can reach: the device's, or on a CPU node what processes may use."""
        return self.memory_limit_bytes if self.node_class is NodeClass.CPU else self.devices.first.memory_bytes

    def registration(self) -> NodeRegistration:
        """Return what the service is told."""
        return NodeRegistration(
            node_class=self.node_class,
            devices=self.devices.devices,
            versions=self.versions,
            code_digest=self.code.digest,
            lacks=self.lacks,
        )


def probe(name: str, node_class: NodeClass | None = None) -> Node:
    """Look at this machine; `node_class` overrides what the probe would choose."""
    found = devices.probe(node_class)
    return Node(
        name=name,
        devices=found,
        code=environment.read_code(),
        versions=environment.versions(found),
        cores=environment.cores(),
        memory_limit_bytes=devices.memory_limit_bytes(),
        lacks=(*found.lacks, *environment.lacks()),
    )
