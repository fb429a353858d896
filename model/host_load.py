"""How much of this machine's processors others used: busy time of the cores less the processor time of this process.

The kernel counts the busy time of every core in ticks (/proc/stat), time that a hypervisor gave to other machines
included. Cores that this process may not use do not count.
"""

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
_IDLE = (3, 4)
"""Places of idle and of waiting for input and output among a core's counters."""
_COUNTED = 8
"""user, nice, system, idle, iowait, irq, softirq, steal; guests are in user already."""


class HostLoad:
    """Measures from its construction on."""

    def __init__(self) -> None:
        self._cores = os.sched_getaffinity(0)
        self._start = self._look()

    def foreign_share(self) -> float | None:
        """Return the share of the cores' time since then that went to others, between 0 and 1.

        None where the kernel's counters are missing, or show less than this process alone used. What the counters
        cannot resolve, two ticks on every core, counts as nothing.
        """
        (wall, own, busy), now = self._start, self._look()
        if busy is None or now[2] is None:
            return None
        spent, total = now[1] - own, now[2] - busy
        slack = 2 * len(self._cores) / os.sysconf("SC_CLK_TCK")
        if total < spent / 2 - slack:
            return None
        foreign = max(0.0, total - spent - slack)
        return min(1.0, foreign / ((now[0] - wall) * len(self._cores)))

    def _look(self) -> tuple[float, float, float | None]:
        """Return seconds: of the clock, of this process on all cores, of everything on our cores."""
        return time.perf_counter(), time.process_time(), busy_seconds(self._cores)


def busy_seconds(cores: set[int]) -> float | None:
    """Return for how many seconds `cores` were busy since boot, summed; None where the kernel does not tell."""
    try:
        rows = [line.split() for line in _STAT.read_text(encoding="ascii").splitlines()]
    except OSError:
        return None
    wanted = {f"cpu{core}" for core in cores}
    ticks = [[int(cell) for cell in row[1 : 1 + _COUNTED]] for row in rows if row and row[0] in wanted]
    if len(ticks) < len(wanted):
        return None
    idle = sum(row[place] for row in ticks for place in _IDLE)
    return (sum(map(sum, ticks)) - idle) / os.sysconf("SC_CLK_TCK")
