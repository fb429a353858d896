"""The devices of this machine and its node class.

A probe reads counters, not the momentary state: a slow-down in the middle of a trial shows, and the driver is not
queried while a step is measured. As a program it prints which process keeps a worker from this machine.
"""

import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil

from ablate.experiments.node_classes import NODE_CLASSES, gpu_class, is_gpu
from ablate.experiments.records.messages import DeviceInfo
from ablate.kernels.backends import NodeClass
from ablate.model.measurements import GIB
from ablate.workers.devices.amd_probe import AmdProbe
from ablate.workers.devices.device_lock import in_use, lock_addresses
from ablate.workers.devices.node_health import ReleaseProof
from ablate.workers.devices.nvidia_probe import NvidiaProbe
from ablate.workers.devices.probe_types import Probe, ProbeResult
from ablate.workers.devices.tpu import LibtpuProbe, TpuProbe
from ablate.workers.environment_variables import lock_scope, state_folder
from ablate.workers.errors import DeviceMissing


class HostProbe(Probe):
    """The machine's own processors, as one device."""

    def find(self) -> ProbeResult:
        """Return the one device, which always exists."""
        device = DeviceInfo(index=0, name=_cpu_name(), serial=None, memory_bytes=memory_limit_bytes())
        return ProbeResult(devices=(device,))


class XlaHostProbe(HostProbe):
    """The machine's own processors under XLA."""

    def find(self) -> ProbeResult:
        """Return the one device where torch_xla is installed."""
        if find_spec("torch_xla") is None:
            sentence = "torch_xla is not installed in this environment; `make tpu` makes one that has it"
            return ProbeResult(lacks=(sentence,))
        return super().find()


PROBES: dict[str, Probe] = {
    "nvidia": NvidiaProbe(),
    "amd": AmdProbe(),
    "tpu": TpuProbe(),
    "host": HostProbe(),
    "xla_host": XlaHostProbe(),
    "libtpu": LibtpuProbe(),
}
"""Every probe under the name that node classes use for it, in the order in which they are tried. The host always
exists, so a probe after it is used only when the operator names its node class."""
_OF_GPUS = ("nvidia", "amd")
"""Probes of devices that have a node class by their own name."""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices that trials on this machine use."""

    node_class: NodeClass
    probe: Probe
    """Reads their memory and state."""
    devices: tuple[DeviceInfo, ...]
    driver: str | None
    lacks: tuple[str, ...]

    @property
    def first(self) -> DeviceInfo:
        """The device of a trial that uses one device."""
        return self.devices[0]

    def held(self, number: int) -> tuple[DeviceInfo, ...]:
        """Return the devices of a trial that was planned for `number`: the first ones, one if they are virtual.

        Raises:
            DeviceMissing: this machine has fewer devices.

        """
        needed = self.node_class.occupied(number)
        if needed > len(self.devices):
            raise DeviceMissing(f"the trial needs {needed} devices; this node has {len(self.devices)}")
        return self.devices[:needed]

    def locks(self, holder: str, *, number: int | None = None) -> tuple[str, ...]:
        """Return the locks of a "worker", a "block" or a "trainer": one per core on the host, else one per device.

        A worker has GPUs as long as it lives, but on the host only its state folder: workers of several folders take
        turns on the cores, a block each. `number` is that of the devices of a trial; None for all devices. A node that
        executes nothing needs no lock.
        """
        if self.node_class.compiles_only:
            return ()
        if self.node_class.on_host and holder == "worker":
            return lock_addresses(["the state folder"], holder=holder, scope=f"home {state_folder().resolve()}")
        if self.node_class.on_host:
            names = [f"core {core}" for core in sorted(os.sched_getaffinity(0))]
        else:
            devices = self.devices if number is None else self.held(number)
            names = [f"{self.node_class.probe} {device.serial or device.index}" for device in devices]
        return lock_addresses(names, holder=holder, scope=lock_scope())

    def proof(self) -> ReleaseProof:
        """Return the check that a trial has left nothing on these devices."""
        real = not (self.node_class.on_host or self.node_class.compiles_only)
        return ReleaseProof(self.probe, [device.index for device in self.devices] if real else ())


def only_when_asked(node_class: str) -> bool:
    """Return whether a machine joins `node_class` only if the operator names it."""
    probe_names, entry = list(PROBES), NODE_CLASSES.get(node_class)
    return entry is not None and entry.probe in probe_names[probe_names.index("host") + 1 :]


def find_devices(wanted: str | None = None) -> Devices:
    """Find the devices of this machine; `wanted` names a node class and overrides the choice of the probes.

    Raises:
        DeviceMissing: this machine has no device of the wanted class.

    """
    if wanted is not None:
        return _find_class(NODE_CLASSES[wanted])
    lacks: list[str] = []
    for name, probe in PROBES.items():
        result = probe.find()
        lacks += result.lacks
        if not result.devices:
            continue
        classes = _classes_of(name, result)
        if classes:
            return _devices(classes[0], probe, result, lacks)
        names = " and ".join(f"'{device}'" for device in dict.fromkeys(device.name for device in result.devices))
        lacks.append(f"devices {names} have no common node class: give each kind a worker; registered as cpu")
    raise DeviceMissing("no probe found a device here, not even the host's")


def _find_class(wanted: NodeClass) -> Devices:
    if wanted.probe is None:
        raise DeviceMissing(f"node class '{wanted}' is configured, but no probe finds its devices yet")
    probe = PROBES[wanted.probe]
    result = probe.find()
    if wanted not in _classes_of(wanted.probe, result):
        names = ", ".join(device.name for device in result.devices) or "nothing"
        reasons = "; ".join((f"its probe found {names}", *result.lacks))
        raise DeviceMissing(f"node class '{wanted}' is configured, but this machine has no such device: {reasons}")
    return _devices(wanted, probe, result, result.lacks)


def _classes_of(probe: str, result: ProbeResult) -> list[NodeClass]:
    """Return the classes to which all found devices belong: a trial may get any of them."""
    if probe in _OF_GPUS:
        classes = {gpu_class(device.name, device.memory_bytes, probe=probe) for device in result.devices}
        sized = {f"{own}-{round(device.memory_bytes / GIB)}gb" for own in classes for device in result.devices}
        if len(classes) > 1 or not result.devices:
            return []
        by_size = [NODE_CLASSES[name] for name in sized if len(sized) == 1 and is_gpu(name)]
        return [*classes, *(one for one in by_size if classes.isdisjoint(NODE_CLASSES.values()))]
    entries = [entry for entry in NODE_CLASSES.values() if entry.probe == probe and result.devices]
    return [entry for entry in entries if all(entry.fits(device.name) for device in result.devices)]


def _devices(node_class: NodeClass, probe: Probe, result: ProbeResult, lacks: Iterable[str]) -> Devices:
    return Devices(node_class=node_class, probe=probe, devices=result.devices, driver=result.driver, lacks=tuple(lacks))


def memory_limit_bytes() -> int:
    """Return the memory that processes here may use: the machine's, or a smaller cgroup limit."""
    total: int = psutil.virtual_memory().total
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    """Print which process uses the devices that a worker with these settings would take; nothing if none does."""
    from ablate.workers.settings import get_settings  # needs a package that an air-gapped node lacks

    sys.stdout.write(in_use(find_devices(get_settings().node_class).locks("worker")) or "")


if __name__ == "__main__":
    main()
