"""The devices of this machine and its node class, from the probes and the table of node classes."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from experiments.records.messages import DeviceInfo
from kernels.backends import NODE_CLASSES, NodeClass
from workers.errors import DeviceMissing
from workers.probe_types import Found, Probe
from workers.probes import PROBES

_FREE_SLACK_BYTES = 64 * 2**20
_FREE_PATIENCE_S = 15.0
_LOOK_EVERY_S = 0.2
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Devices:
    """What this machine can train on."""

    node_class: NodeClass
    probe: Probe
    """Reads their memory and state."""
    devices: tuple[DeviceInfo, ...]
    driver: str | None
    lacks: tuple[str, ...]

    @property
    def first(self) -> DeviceInfo:
        """The device that trials of one device use."""
        return self.devices[0]


def find_devices(asked_for: str | None = None) -> Devices:
    """Look at the machine; `asked_for`, a node class by name, overrides what the probes would choose.

    Raises:
        DeviceMissing: the class that was asked for has no device here.

    """
    if asked_for is not None:
        return _find(NODE_CLASSES[asked_for])
    lacks: list[str] = []
    for name, probe in PROBES.items():
        found = probe.find()
        lacks += found.lacks
        if not found.devices:
            continue
        classes = [entry for entry in NODE_CLASSES.values() if entry.probe == name]
        chosen = next((entry for entry in classes if entry.fits(found.devices[0].name)), None)
        if chosen is not None:
            return _devices(chosen, probe, found, lacks)
        known = ", ".join(map(str, classes))
        lacks.append(f"device '{found.devices[0].name}' has no node class (known: {known}); registered as cpu")
    raise DeviceMissing("no probe found a device here, not even the host's")


def memory_is_free(probe: Probe, before: Mapping[int, int]) -> str | None:
    """Wait until every device is back at the memory it used before; return why not, None when it is."""
    if not before:
        return None
    deadline = time.monotonic() + _FREE_PATIENCE_S
    while True:
        over = [
            f"device {index} still holds {(used - before.get(index, 0)) / _MIB:.0f} MiB more than before the trial"
            for index, used in probe.memory_used().items()
            if used > before.get(index, 0) + _FREE_SLACK_BYTES
        ]
        if not over:
            return None
        if time.monotonic() > deadline:
            return "; ".join(over)
        time.sleep(_LOOK_EVERY_S)


def _find(wanted: NodeClass) -> Devices:
    if wanted.probe is None:
        raise DeviceMissing(f"node class '{wanted}' was asked for, and no probe finds its devices yet")
    probe = PROBES[wanted.probe]
    found = probe.find()
    if not found.devices or not wanted.fits(found.devices[0].name):
        names = ", ".join(device.name for device in found.devices) or "nothing"
        what = "; ".join((f"its probe found {names}", *found.lacks))
        raise DeviceMissing(f"node class '{wanted}' was asked for, and no probe finds its device here: {what}")
    return _devices(wanted, probe, found, found.lacks)


def _devices(node_class: NodeClass, probe: Probe, found: Found, lacks: Iterable[str]) -> Devices:
    return Devices(node_class=node_class, probe=probe, devices=found.devices, driver=found.driver, lacks=tuple(lacks))
