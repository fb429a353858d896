"""Node classes (kinds of machines) and lanes (implementation families of an operation). Torch-free.

A lane that a node class does not have is refused with a reason and never replaced by another. A new node class is one
entry of the table, and a probe in `workers/devices/inventory.py` unless an existing probe can find its devices.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Lane(StrEnum):
    """One implementation family of an operation."""

    REFERENCE = "reference"
    CUDA = "cuda"
    XLA = "xla"
    PEER = "peer"


GENERATED_LANES = (Lane.CUDA, Lane.PEER)
"""Lanes that compile their kernels at the first launch."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeClass:
    """A kind of machine that a spec can ask for."""

    name: str
    lanes: tuple[Lane, ...]
    """Lanes with an implementation for this class, best first."""
    device_type: str
    """Torch's device type. model/training/measurement.py reads clock and peak memory by it."""
    probe: str | None
    """The worker probe that finds the devices and reads their memory and state, or None without one."""
    device_name: str = ""
    """Regular expression to search in the name of a device."""
    tpu_kernels: bool = False
    """Whether Pallas kernels for TPUs can run here, or be compiled on a class that runs nothing."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that a trial needs before it makes a tensor."""
    slices: bool = False
    """Whether the trials of a block may share the memory and run in slices. False where one trainer reserves the
    device's memory, or where another process on the device makes a trial invalid."""
    devices: tuple[int, ...] = (1,)
    """Numbers of devices that one step can be spread over. On host processors the devices are virtual: of XLA, or
    processes that share the cores."""
    command_devices: int = 1
    """Most devices of one node that a command may use."""
    topologies: Mapping[int, str] = field(default_factory=dict)
    """Number of chips -> the compiler's name for them. Empty unless the class compiles and executes nothing."""
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    """Dtype -> dense peak of one device in FLOP/s, for MFU. Without an entry no MFU is stated."""
    memory_bytes_per_s: float | None = None
    """Peak of the memory of one device in bytes/s, None where it is not known."""
    reports: frozenset[str] = frozenset()
    """Receipt fields that its driver and system can fill: events, `clock_mhz`, `foreign_load`. A receipt without
    one of these is invalid."""

    def __str__(self) -> str:
        return self.name

    @property
    def on_host(self) -> bool:
        """Whether trials train on the host's processors and in its memory."""
        return self.probe in ("host", "xla_host")

    @property
    def compiles_only(self) -> bool:
        """Whether a trial only compiles the training step, for absent chips."""
        return bool(self.topologies)

    def fits(self, device_name: str) -> bool:
        """Return whether a device with this name belongs to the class."""
        return re.search(self.device_name, device_name) is not None

    def spreads(self, devices: int) -> tuple[int, ...]:
        """Return how many devices a block may use on a machine with `devices` of them.

        On host processors and for absent chips, all numbers of the class. Otherwise one device or all devices, and
        where commands use several, every number up to `command_devices`.
        """
        if self.on_host or self.compiles_only:
            return self.devices
        together = {number for number in self.devices if number in (1, devices)}
        return tuple(sorted(together | set(range(1, min(devices, self.command_devices) + 1))))

    def shared(self, nodes: int) -> tuple[int, ...]:
        """Return how many devices `nodes` nodes together can spread one step over: the same number on each.

        On several nodes only ranks can share a step, and lane xla has none.
        """
        if nodes == 1:
            return self.offers
        each = () if self.device_type == "xla" else self.devices
        return tuple(nodes * number for number in each)

    @property
    def offers(self) -> tuple[int, ...]:
        """The numbers of devices that a spec may ask for."""
        return tuple(sorted({*self.devices, *range(1, self.command_devices + 1)}))

    def occupied(self, devices: int) -> int:
        """Return how many devices a step over `devices` occupies: 1 if they are virtual or absent."""
        return 1 if self.on_host or self.compiles_only else devices

    def peak(self, dtype: str, devices: int) -> float | None:
        """Return the dense peak of `devices` devices in FLOP/s, or None if the table has none."""
        peak_of_one = self.peak_flops.get(dtype)
        return None if peak_of_one is None else peak_of_one * devices

    def lane_refusal(self, lane: Lane) -> str | None:
        """Return why `lane` cannot run here, or None if it can."""
        return _lane_refusal(lane, [self])


_NVIDIA_EVENTS = (
    "sw_power_cap",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake",
    "ecc_uncorrected",
    "foreign_processes",
)


def _hopper(name: str, *, device_name: str, memory_bytes_per_s: float) -> NodeClass:
    """Return the class of one Hopper card."""
    return NodeClass(
        name=name,
        lanes=(Lane.CUDA, Lane.PEER, Lane.REFERENCE),
        device_type="cuda",
        probe="nvidia",
        device_name=device_name,
        environment={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},  # CUDA and nvidia-smi then number devices alike
        devices=(1, 2, 4, 8),
        command_devices=8,
        peak_flops={"bfloat16": 989.5e12},
        memory_bytes_per_s=memory_bytes_per_s,
        reports=frozenset({"clock_mhz", "foreign_load", *_NVIDIA_EVENTS}),
    )


_TABLE = (
    NodeClass(
        name="cpu",
        lanes=(Lane.REFERENCE,),
        device_type="cpu",
        probe="host",
        slices=True,
        devices=(1, 2, 4),
        reports=frozenset({"foreign_load"}),
    ),
    # https://www.nvidia.com/en-us/data-center/h200/
    _hopper("h200", device_name=r"\bH200\b", memory_bytes_per_s=4.8e12),
    # https://www.nvidia.com/en-us/data-center/h100/: SXM; other H100s do not reach these peaks
    _hopper("h100", device_name=r"\bH100 80GB HBM3\b", memory_bytes_per_s=3.35e12),
    NodeClass(
        name="xla-cpu",
        lanes=(Lane.XLA,),
        device_type="xla",
        probe="xla_host",
        slices=True,
        devices=(1, 2, 4, 8),
        environment={"PJRT_DEVICE": "CPU", "JAX_PLATFORMS": "cpu"},
        reports=frozenset({"foreign_load"}),
    ),
    NodeClass(
        name="tpu-v6e",
        lanes=(Lane.XLA,),
        device_type="xla",
        probe="tpu",
        device_name=r"\bv6e\b",
        tpu_kernels=True,
        environment={"PJRT_DEVICE": "TPU", "JAX_PLATFORMS": "cpu"},
        devices=(1, 4, 8),
        peak_flops={"bfloat16": 918e12},
        reports=frozenset({"foreign_load", "foreign_processes"}),
    ),
    NodeClass(
        name="tpu-v6e-compile",
        lanes=(Lane.XLA,),
        device_type="xla",
        probe="libtpu",
        device_name=r"\bv6\b",
        tpu_kernels=True,
        environment={"PJRT_DEVICE": "CPU", "JAX_PLATFORMS": "cpu"},
        devices=(1, 4, 8, 16),
        topologies={1: "v6e:1x1", 4: "v6e:2x2", 8: "v6e:2x4", 16: "v6e:4x4"},
    ),
)

NODE_CLASSES: dict[str, NodeClass] = {entry.name: entry for entry in _TABLE}
"""Node classes by name."""


def device_refusal(lane: Lane, device_type: str) -> str | None:
    """Return why `lane` cannot run on torch's `device_type`, or None if some node class can run it."""
    classes = [entry for entry in NODE_CLASSES.values() if entry.device_type == device_type]
    if not classes:
        types = dict.fromkeys(entry.device_type for entry in NODE_CLASSES.values())
        return f"device type '{device_type}' is unknown; known: {', '.join(types)}"
    return _lane_refusal(lane, classes)


def _lane_refusal(lane: Lane, classes: Iterable[NodeClass]) -> str | None:
    implemented = dict.fromkeys(own for entry in classes for own in entry.lanes)
    if lane in implemented:
        return None
    names = " or ".join(f"'{entry}'" for entry in classes)
    return f"lane '{lane}' has no implementation on node class {names}; implemented there: {', '.join(implemented)}"
