"""Probes of the TPU lane: chips on this machine's PCI bus, and a compiler for chips that are not there.

A chip has no driver that could be asked from outside: what it holds is known to the process that has opened it, and
no second process can open it. So the proof that a trial has left nothing is that nobody has its device node open.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from experiments.records.messages import DeviceInfo
from kernels import xla_compiler
from workers.devices.device_state import DeviceState
from workers.devices.probe_types import Found
from workers.devices.xla_compilation import ask_compiler
from workers.errors import CompilerFailed, DeviceMissing

GOOGLE = "0x1ae0"
"""PCI vendor."""
CHIPS = {"0x006f": ("TPU v6e", 32 * 2**30)}
"""Chips that a node class is for, by PCI device: name and bytes of HBM."""
OTHER_CHIPS = {"0x0027": "TPU v2/v3", "0x005e": "TPU v4", "0x0062": "TPU v5p", "0x0063": "TPU v5e", "0x0076": "TPU7x"}
LOOKED_FOR = "v6e:1x1"
"""Topology that is asked for to see whether the compiler works."""


class TpuProbe:
    """TPU chips of this machine."""

    def __init__(self, *, sys: Path = Path("/sys"), dev: Path = Path("/dev"), proc: Path = Path("/proc")) -> None:
        self._sys, self._dev, self._proc = sys, dev, proc

    def find(self) -> Found:
        """Look for chips on the PCI bus."""
        here = sorted(self._chips())
        other = [OTHER_CHIPS[device] for device in here if device in OTHER_CHIPS]
        lacks = (f"{len(other)} chips are {other[0]}, which has no node class",) if other else ()
        known = [CHIPS[device] for device in here if device in CHIPS]
        devices = tuple(DeviceInfo(index=i, name=name, memory_bytes=size) for i, (name, size) in enumerate(known))
        return Found(devices=devices, driver=xla_compiler.libtpu_version() if devices else None, lacks=lacks)

    def memory_used(self) -> Mapping[int, int]:
        """Return bytes by chip: all of it while any process has a chip open, since nobody else can use it."""
        held = bool(self._holders())
        return {device.index: device.memory_bytes if held else 0 for device in self.find().devices}

    def users(self) -> tuple[int, ...]:
        """Return the processes that have a chip open."""
        return self._holders()

    def state(self, index: int) -> DeviceState | None:
        """Return the processes that have a chip open; a chip tells nothing else."""
        del index  # nodes are opened all together
        return DeviceState(processes=self._holders()) if self.find().devices else None

    def _chips(self) -> Iterator[str]:
        for folder in (self._sys / "bus" / "pci" / "devices").glob("*"):
            if _read(folder / "vendor") == GOOGLE:
                yield _read(folder / "device")

    def _nodes(self) -> frozenset[Path]:
        """Return the files by which chips are opened: one for each, or one for each group of the IO memory unit."""
        return frozenset({*self._dev.glob("accel*"), *self._dev.glob("vfio/[0-9]*")})

    def _holders(self) -> tuple[int, ...]:
        nodes = self._nodes()
        return tuple(sorted({pid for pid, opened in self._open_files() if opened in nodes}))

    def _open_files(self) -> Iterator[tuple[int, Path]]:
        for folder in self._proc.glob("[0-9]*/fd"):
            pid = int(folder.parent.name)
            try:
                links = list(os.scandir(folder))
            except OSError:
                continue  # it has ended, or is somebody else's
            yield from ((pid, target) for link in links if (target := _target(Path(link.path))) is not None)


class LibtpuProbe:
    """The compiler of a TPU, on a machine that needs none."""

    def find(self) -> Found:
        """Ask the compiler for a topology, in a process of its own."""
        try:
            answer = ask_compiler(xla_compiler.Order(topology=LOOKED_FOR))
        except (CompilerFailed, DeviceMissing) as error:
            return Found(lacks=(f"libtpu cannot compile here: {error}",))
        version, kind = answer["versions"]["libtpu"], answer["device_kind"]
        device = DeviceInfo(index=0, name=f"{kind}, compiled for", memory_bytes=xla_compiler.HBM_BYTES[kind])
        return Found(devices=(device,), driver=f"libtpu {version}")

    def memory_used(self) -> Mapping[int, int]:
        """Return nothing: there is no device that could hold any."""
        return {}

    def users(self) -> tuple[int, ...]:
        """Return nothing: there is no device."""
        return ()

    def state(self, index: int) -> DeviceState | None:
        """Return None: there is no device."""
        return None


def _target(link: Path) -> Path | None:
    try:
        return link.readlink()
    except OSError:
        return None  # closed meanwhile


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
