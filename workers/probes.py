"""Probes: how the devices of a machine are found and their state is read, one for each kind of driver.

Counters are read instead of the momentary state: a slow-down in the middle of a trial is seen, and nothing is asked
while a step is measured.
"""

import csv
import io
import platform
import shutil
import subprocess
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import psutil

from experiments.records.messages import DeviceInfo
from workers.device_state import DeviceState
from workers.errors import DeviceUnknown
from workers.probe_types import Found, Probe
from workers.tpu_probes import LibtpuProbe, TpuProbe

_GPU = "index,name,serial,memory.total,memory.used,driver_version"
_STATE = ",".join(
    (
        "clocks_event_reasons_counters.sw_power_cap",
        "clocks_event_reasons_counters.sw_thermal_slowdown",
        "clocks_event_reasons_counters.hw_thermal_slowdown",
        "clocks_event_reasons_counters.hw_power_brake_slowdown",
        "ecc.errors.uncorrected.volatile.total",
    )
)
_SMI_TIMEOUT_S = 20.0
_MIB = 2**20


class HostProbe:
    """The machine's own processors, as one device."""

    def find(self) -> Found:
        """Return the one device, which is always there."""
        return Found(devices=(DeviceInfo(index=0, name=_cpu_name(), serial=None, memory_bytes=memory_limit_bytes()),))

    def memory_used(self) -> Mapping[int, int]:
        """Return nothing: memory of processes that ended is free."""
        return {}

    def users(self) -> tuple[int, ...]:
        """Return nothing: everybody may use the host."""
        return ()

    def state(self, index: int) -> DeviceState | None:
        """Return None: there are no such counters."""
        return None


class XlaHostProbe(HostProbe):
    """The machine's own processors under XLA."""

    def find(self) -> Found:
        """Return the one device, where torch_xla is installed."""
        if find_spec("torch_xla") is None:
            return Found(lacks=("torch_xla is not installed in this environment; `make tpu` makes one that has it",))
        return super().find()


class NvidiaProbe:
    """NVIDIA GPUs, as nvidia-smi tells of them."""

    def find(self) -> Found:
        """Look for GPUs."""
        smi = shutil.which("nvidia-smi")
        if smi is None:
            return Found()
        try:
            rows = _rows(_ask(smi, f"--query-gpu={_GPU}"))
        except (subprocess.SubprocessError, OSError) as error:
            return Found(lacks=(f"nvidia-smi is installed but failed: {error}",))
        return Found(devices=tuple(_gpu(row) for row in rows), driver=rows[0][5] if rows else None)

    def memory_used(self) -> Mapping[int, int]:
        """Return bytes in use by GPU index. Raises DeviceUnknown when nvidia-smi does not tell."""
        rows = _rows(_told(f"--query-gpu={_GPU}"))
        try:
            return {int(row[0]): int(row[4]) * _MIB for row in rows}
        except (ValueError, IndexError) as error:
            raise DeviceUnknown(f"nvidia-smi tells no memory in use: {rows}") from error

    def users(self) -> tuple[int, ...]:
        """Return the processes on any GPU. Raises DeviceUnknown when nvidia-smi does not tell."""
        pids = _pids(_told("--query-compute-apps=pid"))
        if pids is None:
            raise DeviceUnknown("nvidia-smi hides the number of a process on a GPU")
        return pids

    def state(self, index: int) -> DeviceState | None:
        """Return the counters of GPU `index`, and the processes on all."""
        smi = shutil.which("nvidia-smi")
        if smi is None:
            return None
        counters = _said(smi, f"--query-gpu={_STATE}", f"--id={index}")
        processes = _said(smi, "--query-compute-apps=pid")
        return None if counters is None and processes is None else parse_state(counters, processes)


PROBES: dict[str, Probe] = {
    "nvidia": NvidiaProbe(),
    "tpu": TpuProbe(),
    "host": HostProbe(),
    "xla_host": XlaHostProbe(),
    "libtpu": LibtpuProbe(),
}
"""Every probe by the name that node classes give it. Asked in this order; the host is always found, so what comes after
it is only looked for when it is asked for by name."""


def parse_state(counters: str | None, processes: str | None) -> DeviceState:
    """Read nvidia-smi's answers, without header and units; None is no answer."""
    told = [None] * 5 if counters is None else [_number(cell) for cell in counters.split(",")]
    power_cap, sw_thermal, hw_thermal, power_brake, ecc = told
    return DeviceState(
        sw_power_cap_us=power_cap,
        sw_thermal_slowdown_us=sw_thermal,
        hw_thermal_slowdown_us=hw_thermal,
        hw_power_brake_us=power_brake,
        ecc_uncorrected=ecc,
        processes=None if processes is None else _pids(processes),
    )


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


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _ask(smi: str, *arguments: str) -> str:
    """Return the answer as CSV without header and units. Raises SubprocessError or OSError when there is none."""
    command = [smi, *arguments, "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True).stdout


def _said(smi: str, *arguments: str) -> str | None:
    try:
        return _ask(smi, *arguments)
    except (subprocess.SubprocessError, OSError):
        return None


def _told(*arguments: str) -> str:
    """Return the answer. Raises DeviceUnknown when there is none."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        raise DeviceUnknown("nvidia-smi is not found any more")
    try:
        return _ask(smi, *arguments)
    except (subprocess.SubprocessError, OSError) as error:
        raise DeviceUnknown(f"nvidia-smi failed: {error}") from error


def _pids(lines: str) -> tuple[int, ...] | None:
    """Return the process ids, None when one is hidden."""
    told = [_number(line) for line in lines.split()]
    return None if None in told else tuple(pid for pid in told if pid is not None)


def _rows(table: str) -> list[list[str]]:
    reader = csv.reader(io.StringIO(table), skipinitialspace=True)
    return [[cell.strip() for cell in row] for row in reader if row]


def _gpu(row: list[str]) -> DeviceInfo:
    index, name, serial, total_mib, _used_mib, _driver = row
    known = None if serial.startswith("[") else serial
    return DeviceInfo(index=int(index), name=name, serial=known, memory_bytes=int(total_mib) * _MIB)


def _number(cell: str) -> int | None:
    return int(cell) if cell.strip().isdecimal() else None
