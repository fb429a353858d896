"""Readings from the device and the host: peak memory, clock, and load by others.

Peak memory is two numbers: the bytes in tensors, and the bytes that the process (CPU) or the caching allocator (CUDA)
occupied for them. A CPU has no counter for bytes in tensors, and memory that the C allocator keeps hides differences of
a few MiB in the resident set. So on a CPU one more pass runs after the measured window while torch's allocations are
profiled. The result is equal to the byte for every run of a configuration. XLA on a CPU does not report its buffers, so
both numbers are the resident set, which includes the compiler.

Load by others is the busy time of the cores minus the processor time of this process. The kernel counts the time of
every core in ticks (/proc/stat). On a virtual machine a core may have been ready to run while the hypervisor ran
another machine (steal). This is also load by others, and it is reported separately. Cores that this process may not use
do not count.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import pynvml
import torch
from torch.profiler import ProfilerActivity, profile

from ablate.kernels.xla import device as xla_device
from ablate.model.errors import MeasurementError

_STAT = Path("/proc/stat")
_IDLE = (3, 4)
"""Indices of idle and iowait among a core's counters."""
_STEAL = 7
_COUNTED = 8
"""user, nice, system, idle, iowait, irq, softirq, steal. Guests are part of user."""


@dataclass(frozen=True, kw_only=True)
class CoreTimes:
    """Seconds since boot, summed over cores."""

    busy_s: float
    """Time for processes, interrupts and other machines in place of this one."""
    stolen_s: float
    """Time for other machines in place of this one."""


@dataclass(frozen=True, kw_only=True)
class HostShares:
    """Shares of the cores' time, between 0 and 1."""

    foreign: float | None
    """Share of everything except this process. None if the kernel's counters are missing, or show less time than this
    process used. The resolution of the counters, two ticks per core, counts as 0. Over several parts these errors add
    up as squares."""
    stolen: float | None
    """Part of `foreign` that a hypervisor gave to other machines. None like `foreign`."""


class _Moment(NamedTuple):
    """Seconds at one moment."""

    wall_s: float
    own_s: float
    """Processor time of the measured processes on all cores."""
    cores: CoreTimes | None
    """Times of our cores."""


class HostLoad:
    """Measures the load by others from its construction on, except during pauses.

    `own_s` returns the processor time that is not foreign; default: that of this process.
    """

    def __init__(self, own_s: Callable[[], float] = time.process_time) -> None:
        self._own_s = own_s
        self._cores = os.sched_getaffinity(0)
        self._parts: list[tuple[_Moment, _Moment]] = []
        self._start = self._read()

    def pause(self) -> None:
        """Stop measuring."""
        self._parts.append((self._start, self._read()))

    def resume(self) -> None:
        """Continue after a pause."""
        self._start = self._read()

    def shares(self) -> HostShares:
        """Return the shares of the cores' time that went to others so far. Do not call it during a pause."""
        wall = spent = total = stolen = 0.0
        parts = [*self._parts, (self._start, self._read())]
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

    def _read(self) -> _Moment:
        return _Moment(time.perf_counter(), self._own_s(), core_times(self._cores))


def _share(part: float, whole: float) -> float:
    return round(min(1.0, max(0.0, part) / whole), 6)


def core_times(cores: set[int]) -> CoreTimes | None:
    """Return the times of `cores` since boot, or None if the kernel does not report them."""
    try:
        rows = [line.split() for line in _STAT.read_text(encoding="ascii").splitlines()]
    except OSError:
        return None
    wanted = {f"cpu{core}" for core in cores}
    ticks = [[int(cell) for cell in row[1 : 1 + _COUNTED]] for row in rows if row and row[0] in wanted]
    if len(ticks) < len(wanted):
        return None
    per_second = os.sysconf("SC_CLK_TCK")
    idle = sum(row[index] for row in ticks for index in _IDLE)
    return CoreTimes(
        busy_s=(sum(map(sum, ticks)) - idle) / per_second, stolen_s=sum(row[_STEAL] for row in ticks) / per_second
    )


_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK_RSS = "5"

MEASURED_DEVICES = ("cpu", "cuda", "xla")
"""Torch device types with a reading. Others are refused."""


@dataclass(frozen=True, kw_only=True)
class MemoryPeak:
    """Peak memory since the start of a meter, in bytes."""

    allocated_bytes: int
    """Bytes in tensors."""
    reserved_bytes: int
    """CPU: the resident set. CUDA: bytes that the allocator reserved on the device."""


class PeakMeter:
    """Measures the peak from its construction on. Raises MeasurementError if the system does not report it."""

    def __init__(self, device: torch.device) -> None:
        if device.type not in MEASURED_DEVICES:
            types = ", ".join(MEASURED_DEVICES)
            raise MeasurementError(f"peak memory cannot be measured on devices of type '{device.type}'; known: {types}")
        self._device = device
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        elif device.type != "xla" or xla_device.peak_bytes() is None:
            _reset_peak_rss()

    def read(self, one_pass: Callable[[], None], *, state_bytes: int) -> MemoryPeak:
        """Return the peak so far.

        On a CPU this profiles `one_pass`, a forward and backward pass. `state_bytes` are always in tensors.
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
        return MemoryPeak(allocated_bytes=state_bytes + profiled_peak_bytes(one_pass), reserved_bytes=reserved_bytes)


def profiled_peak_bytes(run: Callable[[], None]) -> int:
    """Run `run` once; return the peak of its CPU bytes that were allocated and not yet freed.

    Raises MeasurementError if torch reports no allocation.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as session:
        run()
    profiler = session.profiler
    events = [] if profiler is None else profiler.kineto_results.events()
    changes: list[tuple[int, int]] = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    if not changes:
        raise MeasurementError("peak memory cannot be measured: torch's profiler reported no allocation")
    return max(accumulate((size for _, size in changes), initial=0))


def read_clock_mhz(device: torch.device) -> float | None:
    """Return the current clock of the multiprocessors in MHz; None where NVIDIA's driver does not report it.

    It takes about 0.1 ms, so call it between two measured steps.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    try:
        return float(torch.cuda.clock_rate(device))
    except (RuntimeError, pynvml.NVMLError):  # torch finds no slice of a GPU; a card does not report its clock
        return None


def _reset_peak_rss() -> None:
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK_RSS, encoding="ascii")
    except OSError as error:
        raise MeasurementError(
            f"peak memory cannot be measured: writing {_CLEAR_REFS} failed ({error.strerror}); "
            f"it takes Linux with CONFIG_PROC_PAGE_MONITOR and a writable /proc"
        ) from error


def _status_bytes(field: str) -> int:
    """Return a field of this process's status, in bytes."""
    try:
        text = _STATUS.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise MeasurementError(f"memory cannot be measured: reading {_STATUS} failed ({error.strerror})") from error
    for line in text.splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise MeasurementError(f"memory cannot be measured: {_STATUS} has no field {field}")
