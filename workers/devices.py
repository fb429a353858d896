"""Probe the machine's devices: GPUs through nvidia-smi, otherwise the CPU as one device."""

import csv
import io
import platform
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from experiments.records.messages import DeviceInfo
from kernels.backends import NodeClass

_QUERY = "index,name,serial,memory.total,memory.used,driver_version"
_SMI_TIMEOUT_S = 20.0
_FREE_SLACK_BYTES = 64 * 2**20
_FREE_PATIENCE_S = 15.0
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One line of nvidia-smi."""

    index: int
    name: str
    serial: str | None
    memory_total_bytes: int
    memory_used_bytes: int
    driver: str


@dataclass(frozen=True, kw_only=True)
class Devices:
    """What this machine can train on."""

    node_class: NodeClass
    devices: tuple[DeviceInfo, ...]
    driver: str | None
    lacks: tuple[str, ...]

    @property
    def first(self) -> DeviceInfo:
        """The device that trials of one device use."""
        return self.devices[0]


def probe(node_class: NodeClass | None = None) -> Devices:
    """Look at the machine; `node_class` overrides what the probe would choose."""
    gpus, lacks = _gpus()
    if gpus and node_class in (None, NodeClass.H200):
        infos = tuple(
            DeviceInfo(index=gpu.index, name=gpu.name, serial=gpu.serial, memory_bytes=gpu.memory_total_bytes)
            for gpu in gpus
        )
        if "H200" in gpus[0].name:
            return Devices(node_class=NodeClass.H200, devices=infos, driver=gpus[0].driver, lacks=lacks)
        lacks = (*lacks, f"GPU '{gpus[0].name}' has no node class (known: h200); registered as cpu")
    chosen = node_class or NodeClass.CPU
    return Devices(node_class=chosen, devices=(_cpu(),), driver=None, lacks=lacks)


def parse_gpus(table: str) -> tuple[Gpu, ...]:
    """Read nvidia-smi's CSV without header and units, columns as in the query."""
    rows = csv.reader(io.StringIO(table), skipinitialspace=True)
    return tuple(_gpu(row) for row in rows if row)


def memory_is_free(before: dict[int, int]) -> str | None:
    """Wait until every GPU is back at the memory it used before; return why not, None when it is."""
    if not before:
        return None
    deadline = time.monotonic() + _FREE_PATIENCE_S
    while True:
        over = [
            f"GPU {index} still holds {(used - before.get(index, 0)) / _MIB:.0f} MiB more than before the trial"
            for index, used in memory_used().items()
            if used > before.get(index, 0) + _FREE_SLACK_BYTES
        ]
        if not over:
            return None
        if time.monotonic() > deadline:
            return "; ".join(over)
        time.sleep(0.2)


def memory_used() -> dict[int, int]:
    """Return bytes in use by GPU index; empty on a machine without GPUs."""
    return {gpu.index: gpu.memory_used_bytes for gpu in _gpus()[0]}


def memory_limit_bytes() -> int:
    """Return the memory that processes here may use: the machine's, or a smaller cgroup limit."""
    total: int = psutil.virtual_memory().total
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def _gpus() -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Return the GPUs and sentences about why there are none, when that is surprising."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return (), ()
    command = [smi, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        return (), (f"nvidia-smi is installed but failed: {error}",)
    return parse_gpus(answer.stdout), ()


def _gpu(row: list[str]) -> Gpu:
    index, name, serial, total_mib, used_mib, driver = (cell.strip() for cell in row)
    return Gpu(
        index=int(index),
        name=name,
        serial=None if serial.startswith("[") else serial,
        memory_total_bytes=int(total_mib) * _MIB,
        memory_used_bytes=int(used_mib) * _MIB,
        driver=driver,
    )


def _cpu() -> DeviceInfo:
    return DeviceInfo(index=0, name=_cpu_name(), serial=None, memory_bytes=memory_limit_bytes())


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
