"""NVIDIA GPUs, as nvidia-smi tells of them: all of them, or those that CUDA_VISIBLE_DEVICES leaves to the worker.

nvidia-smi does not look at that variable, and CUDA does: without this, two workers with a GPU each would take each
other's trainers for intruders.
"""

import csv
import io
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from experiments.records.messages import DeviceInfo
from workers.devices.device_state import DeviceState
from workers.devices.probe_types import Found
from workers.environment_variables import VISIBLE_GPUS, visible_gpus
from workers.errors import DeviceUnknown

_GPU = "index,name,serial,memory.total,memory.used,driver_version,uuid"
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
_LEAST_UUID_CHARS = 8
_MIB = 2**20


class NvidiaProbe:
    """The GPUs of this worker."""

    def find(self) -> Found:
        """Look for GPUs; their order is that of CUDA_VISIBLE_DEVICES, so trials of one device use the first."""
        smi = shutil.which("nvidia-smi")
        if smi is None:
            return Found()
        try:
            rows = _visible(_rows(_ask(smi, f"--query-gpu={_GPU}")))
        except (subprocess.SubprocessError, OSError) as error:
            return Found(lacks=(f"nvidia-smi is installed but failed: {error}",))
        except DeviceUnknown as error:
            return Found(lacks=(str(error),))
        return Found(devices=tuple(_gpu(row) for row in rows), driver=rows[0][5] if rows else None)

    def memory_used(self) -> Mapping[int, int]:
        """Return bytes in use by GPU index. Raises DeviceUnknown when nvidia-smi does not tell."""
        rows = _table()
        try:
            return {int(row[0]): int(row[4]) * _MIB for row in rows}
        except ValueError as error:
            raise DeviceUnknown(f"nvidia-smi tells no memory in use: {rows}") from error

    def users(self) -> tuple[int, ...]:
        """Return the processes on any of the GPUs. Raises DeviceUnknown when nvidia-smi does not tell."""
        own = None if visible_gpus() is None else [row[6] for row in _table()]
        pids = _pids(_told("--query-compute-apps=pid,gpu_uuid"), own)
        if pids is None:
            raise DeviceUnknown("nvidia-smi hides the number of a process on a GPU")
        return pids

    def state(self, index: int) -> DeviceState | None:
        """Return the counters of GPU `index`, and the processes on all of the worker's."""
        try:
            counters = _told(f"--query-gpu={_STATE}", f"--id={index}")
        except DeviceUnknown:
            counters = None
        try:
            processes = self.users()
        except DeviceUnknown:
            processes = None
        return None if counters is None and processes is None else parse_state(counters, processes)


def parse_state(counters: str | None, processes: Sequence[int] | None) -> DeviceState:
    """Read nvidia-smi's answer on counters, without header and units; None is no answer."""
    told = [None] * 5 if counters is None else [_number(cell) for cell in counters.split(",")]
    power_cap, sw_thermal, hw_thermal, power_brake, ecc = told
    return DeviceState(
        sw_power_cap_us=power_cap,
        sw_thermal_slowdown_us=sw_thermal,
        hw_thermal_slowdown_us=hw_thermal,
        hw_power_brake_us=power_brake,
        ecc_uncorrected=ecc,
        processes=None if processes is None else tuple(processes),
    )


def _visible(rows: list[list[str]]) -> list[list[str]]:
    """Return the rows of the worker's GPUs in CUDA's order.

    Raises DeviceUnknown when CUDA_VISIBLE_DEVICES names one that is not there, or one twice: CUDA would go on with
    less.
    """
    if any(len(row) != len(_GPU.split(",")) for row in rows):
        raise DeviceUnknown(f"nvidia-smi tells no table of GPUs, it says: {rows}")
    names = visible_gpus()
    if names is None:
        return rows
    found = [_named(name, rows) for name in names]
    if len({row[0] for row in found}) < len(found):
        raise DeviceUnknown(f"{VISIBLE_GPUS} names a GPU twice: {','.join(names)}")
    return found


def _named(name: str, rows: list[list[str]]) -> list[str]:
    """Return the row of the GPU with this index, or with a UUID that begins so."""
    by_uuid = len(name) >= _LEAST_UUID_CHARS
    fitting = [row for row in rows if name == row[0] or (by_uuid and row[6].startswith(name))]
    if len(fitting) != 1:
        known = ", ".join(f"{row[0]} ({row[6]})" for row in rows) or "none"
        raise DeviceUnknown(f"{VISIBLE_GPUS} names {name!r}; allowed: the index or UUID of a GPU that is here: {known}")
    return fitting[0]


def _table() -> list[list[str]]:
    return _visible(_rows(_told(f"--query-gpu={_GPU}")))


def _ask(smi: str, *arguments: str) -> str:
    """Return the answer as CSV without header and units. Raises SubprocessError or OSError when there is none."""
    command = [smi, *arguments, "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True).stdout


def _told(*arguments: str) -> str:
    """Return the answer. Raises DeviceUnknown when there is none."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        raise DeviceUnknown("nvidia-smi is not found any more")
    try:
        return _ask(smi, *arguments)
    except (subprocess.SubprocessError, OSError) as error:
        raise DeviceUnknown(f"nvidia-smi failed: {error}") from error


def _pids(table: str, own: Sequence[str] | None) -> tuple[int, ...] | None:
    """Return the processes on the GPUs `own`, by UUID, or on any; None when one is hidden."""
    told = [_number(row[0]) for row in _rows(table) if own is None or row[-1] in own]
    return None if None in told else tuple(pid for pid in told if pid is not None)


def _rows(table: str) -> list[list[str]]:
    reader = csv.reader(io.StringIO(table), skipinitialspace=True)
    return [[cell.strip() for cell in row] for row in reader if row]


def _gpu(row: list[str]) -> DeviceInfo:
    index, name, serial, total_mib, *_ = row
    known = None if serial.startswith("[") else serial
    return DeviceInfo(index=int(index), name=name, serial=known, memory_bytes=int(total_mib) * _MIB)


def _number(cell: str) -> int | None:
    return int(cell) if cell.strip().isdecimal() else None
