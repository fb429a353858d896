"""TPUs: probes for chips on this machine's PCI bus, and the compiler for chips of other machines, in its own process.

A chip's driver answers no queries. Only the process that has opened a chip knows its contents, and no second process
can open it. The proof that a trial has left nothing is therefore that no process has the device node open.
"""

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ablate.experiments.records.compilation_report import Overflow
from ablate.experiments.records.messages import DeviceInfo
from ablate.experiments.system.processes import OWN_PYTHON
from ablate.kernels.xla import compiler as xla_compiler
from ablate.workers.devices.probe_types import DeviceState, Probe, ProbeResult
from ablate.workers.errors import CompilerFailed, CompilerKilled, DeviceMissing
from ablate.workers.isolation.environment import compiler_environment

Answer: TypeAlias = Mapping[str, Any]

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([0-9.]+)([KMGT]?)B?"
_OVERFLOWS: tuple[tuple[Literal["hbm", "vmem"], re.Pattern[str]], ...] = (
    ("hbm", re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)")),
    ("hbm", re.compile(rf"memory space hbm\. Used {_SIZE} of {_SIZE} hbm")),
    ("vmem", re.compile(rf"memory space vmem\. Used {_SIZE} of {_SIZE} vmem")),
    ("vmem", re.compile(rf"Allocation \(size={_SIZE}\) would exceed memory \(size={_SIZE}\)[^\n]*space=vmem")),
    ("vmem", re.compile(rf"allocation with size {_SIZE} and limit {_SIZE} exceeded scoped vmem limit")),
)
"""How releases of libtpu report a step that does not fit: the bytes that it needs, then the available bytes."""

_PROGRAM = "ablate.kernels.xla.compiler"
_LAST_LINES = 5
_LINE_LIMIT = 300  # characters


def ask_compiler(order: xla_compiler.Order, *, folder: Path | None = None) -> Answer:
    """Run the compiler on `order` and return its answer; `folder` keeps the order and the answer as files.

    Raises:
        DeviceMissing: no usable compiler is installed here.
        CompilerKilled: another process killed the compiler's process.
        CompilerFailed: the process ended with another error.

    """
    with tempfile.TemporaryDirectory() as temporary:
        order_file = (folder or Path(temporary)) / "compiler-order.json"
        answer_file = order_file.with_name("compiler-answer.json")
        order_file.write_text(json.dumps(asdict(order)), encoding="utf-8")
        command = [*OWN_PYTHON, "-m", _PROGRAM, str(order_file), str(answer_file)]
        process = subprocess.run(
            command,
            env=compiler_environment(),
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        answer = json.loads(answer_file.read_text(encoding="utf-8")) if answer_file.is_file() else {}
    if process.returncode in (-signal.SIGKILL, -signal.SIGTERM):
        raise CompilerKilled(_how_it_ended(process))
    if process.returncode != 0:
        raise CompilerFailed(_how_it_ended(process))
    if "unusable" in answer:
        raise DeviceMissing(answer["unusable"])
    return dict(answer)


def find_overflow(message: str) -> Overflow | None:
    """Return the memory that a step exceeds, with its numbers; None for a refusal with another reason."""
    for memory, pattern in _OVERFLOWS:
        match = pattern.search(message)
        if match is not None:
            needed, unit, available, other = match.groups()
            return Overflow(memory=memory, needed_bytes=_bytes(needed, unit), available_bytes=_bytes(available, other))
    return None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


def _how_it_ended(process: "subprocess.CompletedProcess[str]") -> str:
    code = process.returncode
    how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    lines = [line[:_LINE_LIMIT] for line in process.stderr.splitlines() if line.strip()]
    return "; ".join((f"the compiler's process {how}", *lines[-_LAST_LINES:]))


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
