"""Probes for TPUs: chips on this machine's PCI bus, and a compiler for chips of other machines.

A chip's driver answers no queries. Only the process that has opened a chip knows its contents, and no second process
can open it. The proof that a trial has left nothing is therefore that no process has the device node open.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from ablate.experiments.records.messages import DeviceInfo
from ablate.kernels.xla import compiler as xla_compiler
from ablate.workers.devices.probe_types import DeviceState, Probe, ProbeResult
from ablate.workers.devices.xla_compilation import ask_compiler
from ablate.workers.errors import CompilerFailed, DeviceMissing

GOOGLE = "0x1ae0"
"""PCI vendor."""
CHIPS = {"0x006f": ("TPU v6e", 32 * 2**30)}
"""Chips with a node class, by PCI device: name and bytes of HBM."""
OTHER_CHIPS = {"0x0027": "TPU v2/v3", "0x005e": "TPU v4", "0x0062": "TPU v5p", "0x0063": "TPU v5e", "0x0076": "TPU7x"}
_TEST_TOPOLOGY = "v6e:1x1"
"""Topology whose description shows that the compiler works."""


class TpuProbe(Probe):
    """TPU chips of this machine."""

    def __init__(self, *, sys: Path = Path("/sys"), dev: Path = Path("/dev"), proc: Path = Path("/proc")) -> None:
        self._sys, self._dev, self._proc = sys, dev, proc

    def find(self) -> ProbeResult:
        """Look for chips on the PCI bus."""
        pci_devices = sorted(self._pci_devices())
        others = [OTHER_CHIPS[device] for device in pci_devices if device in OTHER_CHIPS]
        lacks = (f"{len(others)} chips are {others[0]}, which has no node class",) if others else ()
        chips = [CHIPS[device] for device in pci_devices if device in CHIPS]
        devices = tuple(DeviceInfo(index=i, name=name, memory_bytes=size) for i, (name, size) in enumerate(chips))
        return ProbeResult(devices=devices, driver=xla_compiler.libtpu_version() if devices else None, lacks=lacks)

    def memory_used(self) -> Mapping[int, int]:
        """Return the bytes by chip: all of them while any process has a chip open, since no other can use it."""
        in_use = bool(self.users())
        return {device.index: device.memory_bytes if in_use else 0 for device in self.find().devices}

    def users(self) -> tuple[int, ...]:
        """Return the processes that have a chip open."""
        # a chip is opened by a file of its own, or by that of its group of the IO memory unit
        nodes = {*self._dev.glob("accel*"), *self._dev.glob("vfio/[0-9]*")}
        return tuple(sorted({pid for pid, path in self._open_files() if path in nodes}))

    def state(self, index: int) -> DeviceState | None:
        """Return the processes that have a chip open; a chip reports nothing else."""
        del index  # a process opens all device nodes together
        return DeviceState(processes=self.users()) if self.find().devices else None

    def _pci_devices(self) -> Iterator[str]:
        for folder in (self._sys / "bus" / "pci" / "devices").glob("*"):
            if _read(folder / "vendor") == GOOGLE:
                yield _read(folder / "device")

    def _open_files(self) -> Iterator[tuple[int, Path]]:
        for folder in self._proc.glob("[0-9]*/fd"):
            pid = int(folder.parent.name)
            try:
                links = list(os.scandir(folder))
            except OSError:
                continue  # the process has ended, or belongs to another user
            yield from ((pid, target) for link in links if (target := _target(Path(link.path))) is not None)


class LibtpuProbe(Probe):
    """The TPU compiler, on a machine that needs no TPU."""

    def find(self) -> ProbeResult:
        """Ask the compiler to describe a topology, in a process of its own."""
        try:
            answer = ask_compiler(xla_compiler.Order(topology=_TEST_TOPOLOGY))
        except (CompilerFailed, DeviceMissing) as error:
            return ProbeResult(lacks=(f"libtpu cannot compile here: {error}",))
        version, kind = answer["versions"]["libtpu"], answer["device_kind"]
        device = DeviceInfo(index=0, name=f"{kind}, compiled for", memory_bytes=xla_compiler.HBM_BYTES[kind])
        return ProbeResult(devices=(device,), driver=f"libtpu {version}")


def _target(link: Path) -> Path | None:
    try:
        return link.readlink()
    except OSError:
        return None  # closed in the meantime


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
