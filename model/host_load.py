"""Load of the cores by other processes than those of a trial. Torch-free.

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
from pathlib import Path
from typing import NamedTuple

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
