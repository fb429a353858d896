"""Node classes and lanes: one table of the kinds of machines, and which implementation family runs where. Torch-free.

A *lane* is one implementation family of an operation. Asking for one that a node class does not have is refused with
the reason below, never replaced silently. A new node class is one entry of the table, and a probe in
`workers/devices/inventory.py` where none of those can find its devices.
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
"""Lanes whose kernels are compiled at their first launch."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeClass:
    """A kind of machine that a spec can ask for, with everything that differs between kinds."""

    name: str
    lanes: tuple[Lane, ...]
    """Lanes that have an implementation there, best first."""
    device_type: str
    """Torch's name for the kind of device; model/training/measurement.py reads clock and peak memory by it."""
    probe: str | None
    """Which of the workers' probes finds the devices and reads their memory and state; None while there is none."""
    device_name: str = ""
    """Regular expression that is found in the name of such a device."""
    tpu_kernels: bool = False
    """Whether kernels for TPUs (Pallas) can be run there, or compiled where nothing is run."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that a trial on such a device needs before it makes a tensor."""
    slices: bool = False
    """Whether the trials of a block may be in memory together and run in slices. Not where one trainer takes the
    device's memory for itself, or where any other process on the device makes a trial invalid."""
    devices: tuple[int, ...] = (1,)
    """Numbers of devices that one step can be spread over; on the processors of a machine they are virtual."""
    topologies: Mapping[int, str] = field(default_factory=dict)
    """Only on a class that compiles and executes nothing: the chips that it compiles for, by the compiler's name, for
    each number of them."""
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    """Dense peak of one device in FLOP/s by dtype, for MFU; absent means that no MFU is stated."""
    tells: frozenset[str] = frozenset()
    """What its driver and system can tell of a trial: events by the field names of receipts, `clock_mhz`,
    `foreign_load`. A receipt that lacks one of these is not believed."""

    def __str__(self) -> str:
        return self.name

    @property
    def on_host(self) -> bool:
        """Whether trials train on the processors and in the memory of the machine itself."""
        return self.probe in ("host", "xla_host")

    @property
    def compiles_only(self) -> bool:
        """Whether a trial compiles the training step for chips that are not there, and executes nothing."""
        return bool(self.topologies)

    def fits(self, device_name: str) -> bool:
        """Tell whether a device that calls itself `device_name` belongs to this class."""
        return re.search(self.device_name, device_name) is not None

    def spreads(self, devices: int) -> tuple[int, ...]:
        """Return the numbers of devices that one step can be spread over on a machine with `devices` of them.

        Every one of the class where devices are virtual or only compiled for; else one device, or all that are there.
        """
        virtual = self.on_host or self.compiles_only
        return self.devices if virtual else tuple(number for number in self.devices if number in (1, devices))

    def occupied(self, devices: int) -> int:
        """Return how many devices a step over `devices` keeps busy: one machine where they are virtual or not there."""
        return 1 if self.on_host or self.compiles_only else devices

    def peak(self, dtype: str, devices: int) -> float | None:
        """Return the dense peak of `devices` devices in FLOP/s; None where none is stated."""
        one = self.peak_flops.get(dtype)
        return None if one is None else one * devices

    def lane_refusal(self, lane: Lane) -> str | None:
        """Return why `lane` cannot run here, or None when it can."""
        return _lane_refusal(lane, [self])


_NVIDIA_EVENTS = (
    "sw_power_cap",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake",
    "ecc_uncorrected",
    "foreign_processes",
)


def _hopper(name: str, *, device_name: str) -> NodeClass:
    """Return the class of one kind of Hopper card."""
    return NodeClass(
        name=name,
        lanes=(Lane.CUDA, Lane.PEER, Lane.REFERENCE),
        device_type="cuda",
        probe="nvidia",
        device_name=device_name,
        environment={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},  # an index then means the same to CUDA and to nvidia-smi
        peak_flops={"bfloat16": 989.5e12},
        tells=frozenset({"clock_mhz", "foreign_load", *_NVIDIA_EVENTS}),
    )


_TABLE = (
    NodeClass(
        name="cpu",
        lanes=(Lane.REFERENCE,),
        device_type="cpu",
        probe="host",
        slices=True,
        tells=frozenset({"foreign_load"}),
    ),
    _hopper("h200", device_name=r"\bH200\b"),
    _hopper("h100", device_name=r"\bH100 80GB HBM3\b"),  # SXM: the others do not reach that peak
    NodeClass(
        name="xla-cpu",
        lanes=(Lane.XLA,),
        device_type="xla",
        probe="xla_host",
        slices=True,
        devices=(1, 2, 4, 8),
        environment={"PJRT_DEVICE": "CPU", "JAX_PLATFORMS": "cpu"},
        tells=frozenset({"foreign_load"}),
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
        tells=frozenset({"foreign_load", "foreign_processes"}),
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
"""Every node class by name."""


def device_refusal(lane: Lane, device_type: str) -> str | None:
    """Return why `lane` cannot run on devices of torch's `device_type`, or None when it can on some node class."""
    classes = [entry for entry in NODE_CLASSES.values() if entry.device_type == device_type]
    if not classes:
        known = dict.fromkeys(entry.device_type for entry in NODE_CLASSES.values())
        return f"device type '{device_type}' is unknown; known: {', '.join(known)}"
    return _lane_refusal(lane, classes)


def _lane_refusal(lane: Lane, classes: Iterable[NodeClass]) -> str | None:
    there = dict.fromkeys(known for entry in classes for known in entry.lanes)
    if lane in there:
        return None
    names = " or ".join(f"'{entry}'" for entry in classes)
    known = ", ".join(there) or "none yet"
    return f"lane '{lane}' has no implementation on node class {names}; implemented there: {known}"
