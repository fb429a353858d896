"""How much of this machine's processors others used: busy time of the cores less the processor time of this process.

The kernel counts the time of every core in ticks (/proc/stat). On a virtual machine a core may have been ready to run
while the hypervisor ran another machine in its place (steal): that is load by others too, and told by itself. Cores
that this process may not use do not count.
"""

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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
