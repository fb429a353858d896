"""Clocks and memory of a command's GPUs, sampled while it runs.

The samples come from the driver's library, which answers in well under a millisecond and makes no context on a GPU.
"""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pynvml

from ablate.experiments.system.processes import descendants_of
from ablate.workers.devices.nvidia_probe import NoDriver, answer, open_gpus
from ablate.workers.errors import DeviceUnknown

CLOCK_EVERY_S = 0.05
MEMORY_EVERY_S = 0.2


class DeviceSamples:
    """Samples of the first GPUs of this worker; none without GPUs, and no clocks of cards without one."""

    def __init__(self, devices: int) -> None:
        """Look for `devices` GPUs. Raises DeviceUnknown if the driver does not know one of them."""
        self._handles = _handles(devices) if devices else []
        self._sampled_at = 0.0
        self.clocks: list[tuple[float, float]] = []
        """Moments of the monotonic clock, and the clock of the slowest GPU in MHz."""
        self._memory_at = 0.0
        self._own: dict[int, bool] = {}
        """Whether a process on a GPU belongs to the trial."""
        self.peak_bytes: int | None = None
        """Most memory that the trial's processes had on one GPU, at any sample; None if none was seen on a GPU."""

    def sample(self) -> None:
        """Read clocks and memory, unless there are samples of this moment."""
        now = time.monotonic()
        if not self._handles or now - self._sampled_at < CLOCK_EVERY_S:
            return
        self._sampled_at = now
        clocks = [answer("ClockInfo", handle, pynvml.NVML_CLOCK_SM) for handle in self._handles]
        if None not in clocks:
            self.clocks.append((now, float(min(clocks))))
        if now - self._memory_at >= MEMORY_EVERY_S:
            self._memory_at = now
            rows = [answer("ComputeRunningProcesses", handle) or () for handle in self._handles]
            self._take([{row.pid: row.usedGpuMemory for row in one} for one in rows])

    def clock_at(self, moment: float) -> float | None:
        """Return the clock of the slowest GPU in MHz in the sample nearest to a moment of the monotonic clock."""
        return min(self.clocks, key=lambda sample: abs(sample[0] - moment))[1] if self.clocks else None

    def _take(self, tables: Sequence[Mapping[int, int | None]]) -> None:
        """Keep the greatest sum of the trial's processes on one GPU. A process without a number is left out."""
        unknown = {pid for table in tables for pid in table} - self._own.keys()
        if unknown:
            family = set(descendants_of([os.getpid()]))
            self._own |= {pid: pid in family for pid in unknown}
        for table in tables:
            used = [size for pid, size in table.items() if self._own[pid] and size is not None]
            if used:
                self.peak_bytes = max(self.peak_bytes or 0, sum(used))


def _handles(devices: int) -> list[Any]:
    """Return the driver's handles of the first `devices` GPUs of this worker; none without a driver of NVIDIA."""
    try:
        with open_gpus() as gpus:
            pynvml.nvmlInit()  # once more: handles last while the library is open
            handles = [gpu.handle for gpu in gpus[:devices]]
    except NoDriver:
        return []
    if len(handles) < devices:
        raise DeviceUnknown(f"the trial needs {devices} GPUs; this worker has {len(handles)}")
    return handles
