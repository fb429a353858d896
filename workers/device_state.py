"""What the driver says about a GPU before and after a trial: time spent slowed down, memory errors, other processes.

Counters are read instead of the momentary state: a slow-down in the middle of a trial is seen, and nothing is asked
while a step is measured.
"""

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_COUNTERS = {
    "sw_power_cap": "clocks_event_reasons_counters.sw_power_cap",
    "sw_thermal_slowdown": "clocks_event_reasons_counters.sw_thermal_slowdown",
    "hw_thermal_slowdown": "clocks_event_reasons_counters.hw_thermal_slowdown",
    "hw_power_brake": "clocks_event_reasons_counters.hw_power_brake_slowdown",
}
"""Microseconds since the driver was loaded, by the names that receipts use."""

_ECC = "ecc.errors.uncorrected.volatile.total"
_SMI_TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True)
class DeviceState:
    """Counters of one GPU at one moment; what the driver does not tell is absent."""

    counters: Mapping[str, int]
    processes: tuple[int, ...]
    """Processes on any GPU of this machine."""


def read_state(index: int) -> DeviceState | None:
    """Ask the driver about GPU `index`; None on a machine without nvidia-smi, or with one that knows no counters."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    fields = ",".join([*_COUNTERS.values(), _ECC])
    line = _ask(smi, f"--query-gpu={fields}", f"--id={index}")
    processes = _ask(smi, "--query-compute-apps=pid")
    return None if line is None or processes is None else parse_state(line, processes)


def parse_state(line: str, processes: str) -> DeviceState:
    """Read nvidia-smi's answers, without header and units."""
    cells = [cell.strip() for cell in line.strip().split(",")]
    known = zip([*_COUNTERS, "ecc_uncorrected"], cells, strict=True)
    return DeviceState(
        counters={name: int(cell) for name, cell in known if cell.isdigit()},
        processes=tuple(int(pid) for pid in processes.split() if pid.isdigit()),
    )


def changes(before: DeviceState | None, after: DeviceState | None) -> dict[str, Any] | None:
    """Return what a receipt records of a trial between the two moments, or None when nothing could be asked.

    Slow-downs in seconds, new uncorrected memory errors, and processes that were there before or after the trial: the
    trial's own are not.
    """
    if before is None or after is None:
        return None
    found: dict[str, Any] = {}
    for name, count in after.counters.items():
        more = count - before.counters.get(name, count)
        found[name] = more if name == "ecc_uncorrected" else round(more / 1e6, 6)
    found["foreign_processes"] = sorted({*before.processes, *after.processes})
    return found


def _ask(smi: str, *arguments: str) -> str | None:
    command = [smi, *arguments, "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return None
