"""NVIDIA GPUs as nvidia-smi reports them: all, or those that CUDA_VISIBLE_DEVICES assigns to this worker.

nvidia-smi ignores that variable, but CUDA obeys it. Without this filter, two workers with one GPU each would report
each other's trainers as foreign processes.
"""

import csv
import io
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from ablate.experiments.records.messages import DeviceInfo
from ablate.workers.devices.probe_types import DeviceState, Probe, ProbeResult
from ablate.workers.environment_variables import VISIBLE_GPUS, visible_gpus
from ablate.workers.errors import DeviceUnknown

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


class NvidiaProbe(Probe):
    """The GPUs of this worker."""

    def find(self) -> ProbeResult:
        """Return the GPUs in the order of CUDA_VISIBLE_DEVICES: a trial of one device uses the first."""
        if shutil.which("nvidia-smi") is None:
            return ProbeResult()
        try:
            rows = _gpu_rows()
        except DeviceUnknown as error:
            return ProbeResult(lacks=(str(error),))
        return ProbeResult(devices=tuple(_gpu(row) for row in rows), driver=rows[0][5] if rows else None)

    def memory_used(self) -> Mapping[int, int]:
        """Return the bytes in use by GPU index. Raises DeviceUnknown when nvidia-smi does not report them."""
        rows = _gpu_rows()
        try:
            return {int(row[0]): int(row[4]) * _MIB for row in rows}
        except ValueError as error:
            raise DeviceUnknown(f"nvidia-smi reports no memory in use: {rows}") from error

    def users(self) -> tuple[int, ...]:
        """Return the processes on any of the GPUs. Raises DeviceUnknown when nvidia-smi does not report them."""
        own = None if visible_gpus() is None else [row[6] for row in _gpu_rows()]
        table = _rows(_query("--query-compute-apps=pid,gpu_uuid"))
        pids = [_number(row[0]) for row in table if own is None or row[-1] in own]
        if None in pids:
            raise DeviceUnknown("nvidia-smi hides the number of a process on a GPU")
        return tuple(pid for pid in pids if pid is not None)

    def state(self, index: int) -> DeviceState | None:
        """Return the counters of GPU `index` and the processes on all GPUs of this worker."""
        try:
            counters = _query(f"--query-gpu={_STATE}", f"--id={index}")
        except DeviceUnknown:
            counters = None
        try:
            processes = self.users()
        except DeviceUnknown:
            processes = None
        return None if counters is None and processes is None else parse_state(counters, processes)


def parse_state(counters: str | None, processes: Sequence[int] | None) -> DeviceState:
    """Read nvidia-smi's line of counters, without header and units; None stands for no answer."""
    cells = [None] * 5 if counters is None else [_number(cell) for cell in counters.split(",")]
    power_cap, sw_thermal, hw_thermal, power_brake, ecc = cells
    return DeviceState(
        sw_power_cap_us=power_cap,
        sw_thermal_slowdown_us=sw_thermal,
        hw_thermal_slowdown_us=hw_thermal,
        hw_power_brake_us=power_brake,
        ecc_uncorrected=ecc,
        processes=None if processes is None else tuple(processes),
    )


def _gpu_rows() -> list[list[str]]:
    """Return the table rows of the worker's GPUs in CUDA's order.

    Raises DeviceUnknown when CUDA_VISIBLE_DEVICES names a missing GPU, or one twice: CUDA would silently use fewer.
    """
    rows = _rows(_query(f"--query-gpu={_GPU}"))
    if any(len(row) != len(_GPU.split(",")) for row in rows):
        raise DeviceUnknown(f"nvidia-smi printed no table of GPUs: {rows}")
    names = visible_gpus()
    if names is None:
        return rows
    chosen = [_named(name, rows) for name in names]
    if len({row[0] for row in chosen}) < len(chosen):
        raise DeviceUnknown(f"{VISIBLE_GPUS} names a GPU twice: {','.join(names)}")
    return chosen


def _named(name: str, rows: list[list[str]]) -> list[str]:
    """Return the row of the GPU with this index, or with a UUID that begins so."""
    by_uuid = len(name) >= _LEAST_UUID_CHARS
    matches = [row for row in rows if name == row[0] or (by_uuid and row[6].startswith(name))]
    if len(matches) != 1:
        present = ", ".join(f"{row[0]} ({row[6]})" for row in rows) or "none"
        raise DeviceUnknown(f"{VISIBLE_GPUS} names {name!r}; allowed: index or UUID of a present GPU: {present}")
    return matches[0]


def _query(*arguments: str) -> str:
    """Return nvidia-smi's answer as CSV without header and units. Raises DeviceUnknown when it gives none."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        raise DeviceUnknown("nvidia-smi has disappeared")
    command = [smi, *arguments, "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=_SMI_TIMEOUT_S,
            check=True,
        ).stdout
    except (subprocess.SubprocessError, OSError) as error:
        raise DeviceUnknown(f"nvidia-smi failed: {error}") from error


def _rows(table: str) -> list[list[str]]:
    reader = csv.reader(io.StringIO(table), skipinitialspace=True)
    return [[cell.strip() for cell in row] for row in reader if row]


def _gpu(row: list[str]) -> DeviceInfo:
    index, name, serial, total_mib, *_ = row
    return DeviceInfo(
        index=int(index),
        name=name,
        serial=None if serial.startswith("[") else serial,
        memory_bytes=int(total_mib) * _MIB,
    )


def _number(cell: str) -> int | None:
    return int(cell) if cell.strip().isdecimal() else None
