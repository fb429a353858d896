"""The devices of this machine and its node class, from the probes and the table of node classes."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

from experiments.records.messages import DeviceInfo
from kernels.backends import NODE_CLASSES, NodeClass
from workers.devices.device_lock import lock_addresses
from workers.devices.probe_types import Found, Probe
from workers.devices.probes import PROBES
from workers.devices.release import ReleaseProof
from workers.environment_variables import lock_scope
from workers.errors import DeviceMissing


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

    def locks(self, holder: str) -> tuple[str, ...]:
        """Return the locks that a "worker" or a "trainer" here has to hold: of every core where trials use the cores.

        No locks where nothing is executed.
        """
        if self.node_class.compiles_only:
            return ()
        if self.node_class.on_host:
            names = [f"core {core}" for core in sorted(os.sched_getaffinity(0))]
        else:
            names = [f"{self.node_class.probe} {device.serial or device.index}" for device in self.devices]
        return lock_addresses(names, holder=holder, scope=lock_scope())

    def proof(self) -> ReleaseProof:
        """Return what proves, after every trial, that the devices are free."""
        real = not (self.node_class.on_host or self.node_class.compiles_only)
        return ReleaseProof(self.probe, [device.index for device in self.devices] if real else ())


def only_when_asked(node_class: str) -> bool:
    """Tell whether no machine is taken for `node_class` unless it is asked for by name."""
    names, known = list(PROBES), NODE_CLASSES.get(node_class)
    return known is not None and known.probe in names[names.index("host") + 1 :]


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
        chosen = next((entry for entry in classes if _all_fit(entry, found)), None)
        if chosen is not None:
            return _devices(chosen, probe, found, lacks)
        lacks.append(f"{_no_class(found)} (known: {', '.join(map(str, classes))}); registered as cpu")
    raise DeviceMissing("no probe found a device here, not even the host's")


def _find(wanted: NodeClass) -> Devices:
    if wanted.probe is None:
        raise DeviceMissing(f"node class '{wanted}' was asked for, and no probe finds its devices yet")
    probe = PROBES[wanted.probe]
    found = probe.find()
    if not _all_fit(wanted, found):
        names = ", ".join(device.name for device in found.devices) or "nothing"
        what = "; ".join((f"its probe found {names}", *found.lacks))
        raise DeviceMissing(f"node class '{wanted}' was asked for, and no probe finds its device here: {what}")
    return _devices(wanted, probe, found, found.lacks)


def _all_fit(node_class: NodeClass, found: Found) -> bool:
    """Tell whether there are devices and every one is of this class: a trial may get any of them."""
    return bool(found.devices) and all(node_class.fits(device.name) for device in found.devices)


def _no_class(found: Found) -> str:
    names = [f"'{name}'" for name in dict.fromkeys(device.name for device in found.devices)]
    if len(names) == 1:
        return f"device {names[0]} has no node class"
    return f"devices {' and '.join(names)} have no common node class"


def _devices(node_class: NodeClass, probe: Probe, found: Found, lacks: Iterable[str]) -> Devices:
    return Devices(node_class=node_class, probe=probe, devices=found.devices, driver=found.driver, lacks=tuple(lacks))
