"""Wait until the other processes of this machine leave its cores to a trial, for a limited time.

A trial during which others take more than the spec allows does not count, so its block would run again whole. A look at
the cores counts all busy time, also that of other virtual machines: no trial of this worker runs meanwhile.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from ablate.workers.blocks.surroundings import ProcessTimes, busiest, process_times

FIRST_LOOK_S = 0.2
"""Length of the first look, which every trial pays on a quiet machine."""
LOOK_S = 1.0
_NAMES_EVERY_S = 5.0
"""Time between two readings of all processes, for the names of the busiest ones."""


@dataclass(frozen=True, kw_only=True)
class CoreLoad:
    """Counters of the cores at one moment, in seconds."""

    at_s: float
    busy_s: float
    """Summed over the cores since the machine started."""
    cores: int

    def share_since(self, earlier: "CoreLoad") -> float:
        """Return the busy share of the cores' time, between 0 and 1."""
        whole = (self.at_s - earlier.at_s) * self.cores
        return min(1.0, max(0.0, self.busy_s - earlier.busy_s) / whole) if whole > 0 else 0.0


def read_load() -> CoreLoad:
    """Return the counters of the cores that this process may use."""
    every = psutil.cpu_times(percpu=True)
    cores = [every[core] for core in sorted(os.sched_getaffinity(0)) if core < len(every)] or every
    busy_s = sum(one.user + one.nice + one.system + one.irq + one.softirq + one.steal for one in cores)
    return CoreLoad(at_s=time.monotonic(), busy_s=busy_s, cores=len(cores))


class Quiet:
    """Waits for quiet cores, and says for what it waits."""

    def __init__(
        self,
        *,
        pause: Callable[[float], None],
        says: Callable[[str | None], None],
        read: Callable[[], CoreLoad] = read_load,
        processes: Callable[[], ProcessTimes] = process_times,
    ) -> None:
        """`pause` sleeps, or raises if the block has to stop; `says` gets the reason, and None at the end."""
        self._pause = pause
        self._says = says
        self._read = read
        self._processes = processes

    def wait(self, limit: float, *, most_s: float) -> bool:
        """Return True once others take at most `limit` of the cores' time; False after `most_s` seconds."""
        if limit >= 1.0 or most_s <= 0:
            return True
        begun = before = self._read()
        self._pause(FIRST_LOOK_S)
        now = self._read()
        if now.share_since(before) <= limit:
            return True
        try:
            return self._until(limit, begun, now, most_s)
        finally:
            self._says(None)

    def _until(self, limit: float, begun: CoreLoad, now: CoreLoad, most_s: float) -> bool:
        load, names = now.share_since(begun), _Names(self._processes)
        while (left_s := most_s - (now.at_s - begun.at_s)) >= FIRST_LOOK_S:
            who = names.at(now.at_s)
            self._says(
                f"quiet: others take {load:.0%} of the cores' time{f' (busiest: {who})' if who else ''}; "
                f"placement.max_foreign_load allows {limit:.0%}; it waits at most {left_s:.0f} s more"
            )
            before = now
            self._pause(min(LOOK_S, left_s))
            now = self._read()
            load = now.share_since(before)
            if load <= limit:
                return True
        return False


class _Names:
    """The names of the processes that used most processor time lately."""

    def __init__(self, processes: Callable[[], ProcessTimes]) -> None:
        self._processes = processes
        self._before = processes()
        self._text, self._due_s = "", 0.0

    def at(self, now_s: float) -> str:
        """Return the names of the busiest processes, read at most every few seconds."""
        if self._due_s == 0.0:  # nothing to compare with before the first look
            self._due_s = now_s + LOOK_S
        elif now_s >= self._due_s:
            after = self._processes()
            names = (one.name for one in busiest(self._before, after, exclude={os.getpid()}))
            self._text = ", ".join(dict.fromkeys(names))
            self._before, self._due_s = after, now_s + _NAMES_EVERY_S
        return self._text
