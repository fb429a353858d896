"""What a trial reads from its device: peak memory and clock.

Peak memory is the bytes in tensors, and what the process (CPU) or the caching allocator (CUDA) held for them. A CPU
has no counter for bytes in tensors, and the resident set hides differences of a few MiB behind what the C allocator
keeps. So on a CPU one more pass is run after the measured window, with torch's allocations watched: the same for every
run of one configuration, to the byte. XLA on a CPU tells nothing of its buffers: there both numbers are the resident
set, which holds the compiler too.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from kernels import xla_device
from model.errors import MeasurementError

_STAT = Path("/proc/stat")
_IDLE = (3, 4)
"""Places of idle and of waiting for input and output among a core's counters."""
_STEAL = 7
_COUNTED = 8
"""user, nice, system, idle, iowait, irq, softirq, steal; guests are in user already."""


@dataclass(frozen=True, kw_only=True)
class CoreTimes:
    """Seconds since boot, summed over cores."""

    busy_s: float
    """Of anything: processes, interrupts, other machines in this one's place."""
    stolen_s: float
    """Of other machines in this one's place."""


@dataclass(frozen=True, kw_only=True)
class HostShares:
    """Shares of the cores' time, between 0 and 1."""

    foreign: float | None
    """Of anything but this process; None where the kernel's counters are missing, or show less than this process alone
    used. What the counters cannot resolve counts as nothing: two ticks on every core; over several parts their errors
    add up as squares."""
    stolen: float | None
    """What of it a hypervisor gave to other machines; None like `foreign`."""


class _Look(NamedTuple):
    """Seconds at one moment."""

    wall_s: float
    own_s: float
    """Of this process on all cores."""
    cores: CoreTimes | None
    """Of everything on our cores."""


class HostLoad:
    """Measures from its construction on, but for its pauses."""

    def __init__(self) -> None:
        self._cores = os.sched_getaffinity(0)
        self._parts: list[tuple[_Look, _Look]] = []
        self._start = self._look()

    def pause(self) -> None:
        """Leave out what follows."""
        self._parts.append((self._start, self._look()))

    def resume(self) -> None:
        """Count again after a pause."""
        self._start = self._look()

    def shares(self) -> HostShares:
        """Return the shares of the cores' time that went to others so far; not to be asked during a pause."""
        wall = spent = total = stolen = 0.0
        parts = [*self._parts, (self._start, self._look())]
        for start, end in parts:
            if start.cores is None or end.cores is None:
                return HostShares(foreign=None, stolen=None)
            wall += end.wall_s - start.wall_s
            spent += end.own_s - start.own_s
            total += end.cores.busy_s - start.cores.busy_s
            stolen += end.cores.stolen_s - start.cores.stolen_s
        slack = 2 * len(self._cores) / os.sysconf("SC_CLK_TCK") * math.sqrt(len(parts))
        if total < spent / 2 - slack:
            return HostShares(foreign=None, stolen=None)
        whole = wall * len(self._cores)
        return HostShares(foreign=_share(total - spent - slack, whole), stolen=_share(stolen - slack, whole))

    def _look(self) -> _Look:
        return _Look(time.perf_counter(), time.process_time(), core_times(self._cores))


def _share(part: float, whole: float) -> float:
    return round(min(1.0, max(0.0, part) / whole), 6)


def core_times(cores: set[int]) -> CoreTimes | None:
    """Return how `cores` spent their time since boot; None where the kernel does not tell."""
    try:
        rows = [line.split() for line in _STAT.read_text(encoding="ascii").splitlines()]
    except OSError:
        return None
    wanted = {f"cpu{core}" for core in cores}
    ticks = [[int(cell) for cell in row[1 : 1 + _COUNTED]] for row in rows if row and row[0] in wanted]
    if len(ticks) < len(wanted):
        return None
    per_second = os.sysconf("SC_CLK_TCK")
    idle = sum(row[place] for row in ticks for place in _IDLE)
    return CoreTimes(
        busy_s=(sum(map(sum, ticks)) - idle) / per_second, stolen_s=sum(row[_STEAL] for row in ticks) / per_second
    )


_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK_RSS = "5"
_CAN_ASK_THE_CLOCK = find_spec("pynvml") is not None

MEASURED_DEVICES = ("cpu", "cuda", "xla")
"""Torch's device types that can be read; one that is not here is refused, not read as another."""


@dataclass(frozen=True, kw_only=True)
class MemoryPeak:
    """Highest memory since a meter was started, in bytes."""

    allocated_bytes: int
    """Bytes in tensors."""
    reserved_bytes: int
    """CPU: the resident set. CUDA: bytes that the allocator holds on the device."""


class PeakMeter:
    """Measures the peak from its construction on; raises MeasurementError where the system does not tell."""

    def __init__(self, device: torch.device) -> None:
        if device.type not in MEASURED_DEVICES:
            known = ", ".join(MEASURED_DEVICES)
            raise MeasurementError(f"peak memory cannot be measured on devices of type '{device.type}'; known: {known}")
        self._device = device
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        elif device.type != "xla" or xla_device.peak_bytes() is None:
            _reset_peak_rss()

    def read(self, one_pass: Callable[[], None], *, held_bytes: int) -> MemoryPeak:
        """Return the peak up to now.

        On a CPU `one_pass`, a forward and backward pass, is run and watched; `held_bytes` are in tensors all the time.
        """
        if self._device.type == "cuda":
            return MemoryPeak(
                allocated_bytes=torch.cuda.max_memory_allocated(self._device),
                reserved_bytes=torch.cuda.max_memory_reserved(self._device),
            )
        if self._device.type == "xla":
            peak = xla_device.peak_bytes() or _status_bytes("VmHWM")
            return MemoryPeak(allocated_bytes=peak, reserved_bytes=peak)
        reserved_bytes = _status_bytes("VmHWM")
        return MemoryPeak(allocated_bytes=held_bytes + watched_peak_bytes(one_pass), reserved_bytes=reserved_bytes)


def watched_peak_bytes(run: Callable[[], None]) -> int:
    """Run `run` once; return the highest sum of CPU bytes that it had allocated and not yet freed.

    Raises MeasurementError when torch reports no allocation at all.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        run()
    profiler = watched.profiler
    events = [] if profiler is None else profiler.kineto_results.events()
    changes: list[tuple[int, int]] = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    if not changes:
        raise MeasurementError("peak memory cannot be measured: torch's profiler reported no allocation")
    return max(accumulate((size for _, size in changes), initial=0))


def read_clock_mhz(device: torch.device) -> float | None:
    """Return the clock of the multiprocessors in MHz now; None on a CPU, and without the package nvidia-ml-py.

    Costs about 0.1 ms, so it is asked between two measured steps.
    """
    if device.type != "cuda" or not _CAN_ASK_THE_CLOCK:
        return None
    return float(torch.cuda.clock_rate(device))


def _reset_peak_rss() -> None:
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK_RSS, encoding="ascii")
    except OSError as error:
        raise MeasurementError(
            f"peak memory cannot be measured: writing {_CLEAR_REFS} failed ({error.strerror}); "
            f"it takes Linux with CONFIG_PROC_PAGE_MONITOR and a writable /proc"
        ) from error


def _status_bytes(field: str) -> int:
    """Return a field of this process's status in bytes."""
    try:
        text = _STATUS.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise MeasurementError(f"memory cannot be measured: reading {_STATUS} failed ({error.strerror})") from error
    for line in text.splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise MeasurementError(f"memory cannot be measured: {_STATUS} has no field {field}")
