"""What else happens on this machine: the wait for quiet cores before a trial, and what others did while it ran.

A trial during which others take more than the spec allows does not count, so its block would run again whole. A look at
the cores counts all busy time, also that of other virtual machines: no trial of this worker runs meanwhile.
"""

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import psutil

from ablate.experiments.records.receipts import DeviceEvents, ForeignProcess
from ablate.workers.devices.inventory import Devices
from ablate.workers.devices.probe_types import DeviceState

MOST = 3
MIN_CPU_S = 0.05
"""A process that used less is not named."""

ProcessTimes = Mapping[tuple[int, float], tuple[str, float]]
"""By process id and start time: name and processor seconds."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The machine just before a trial."""

    started_at: datetime
    load_average: float
    """Of the last minute."""
    devices: tuple[DeviceState | None, ...]
    """Of each device of the trial."""
    processes: ProcessTimes


def look_around(devices: Devices, number: int) -> Surroundings:
    """Return the machine's state now, and that of the devices of a trial that was planned for `number`."""
    return Surroundings(
        started_at=datetime.now(UTC),
        load_average=os.getloadavg()[0],
        devices=tuple(devices.probe.state(device.index) for device in devices.held(number)),
        processes=process_times(),
    )


def process_times() -> ProcessTimes:
    """Return the processor time of every visible process."""
    times = {}
    for process in psutil.process_iter(["name", "cpu_times", "create_time"]):
        info = process.info
        if info["cpu_times"] is not None and info["create_time"] is not None:
            seconds = info["cpu_times"].user + info["cpu_times"].system
            times[process.pid, info["create_time"]] = (info["name"] or "?", seconds)
    return times


def busiest(before: ProcessTimes, after: ProcessTimes, *, exclude: Collection[int] = ()) -> tuple[ForeignProcess, ...]:
    """Return the processes, `exclude` left out, that used most processor time in between; busiest first.

    A process that ended in between is missing here, but the load of the cores includes it.
    """
    used = [
        ForeignProcess(pid=key[0], name=name, cpu_s=round(seconds - before.get(key, ("", 0.0))[1], 2))
        for key, (name, seconds) in after.items()
        if key[0] not in exclude
    ]
    busy = [process for process in used if process.cpu_s >= MIN_CPU_S]
    return tuple(sorted(busy, key=lambda process: -process.cpu_s)[:MOST])


def worst_of(events: Sequence[DeviceEvents | None]) -> DeviceEvents | None:
    """Return what happened to the devices of one trial together; None if one device has no counters.

    Times are those of the device that was slowed down longest, because the others wait for it. Errors are added up. A
    number that one device does not report is unknown.
    """
    if None in events:
        return None
    values: dict[str, Any] = {}
    for name in DeviceEvents.model_fields:
        column = [getattr(one, name) for one in events]
        if None not in column:
            values[name] = _TOGETHER.get(name, max)(column)
    return DeviceEvents(**values)


def _union(columns: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted({pid for pids in columns for pid in pids}))


_TOGETHER: Mapping[str, Callable[[Any], Any]] = {"ecc_uncorrected": sum, "foreign_processes": _union}
"""How events of several devices become one number; else by the greatest."""


ANY_LOAD = 0.99
"""Who allows others so much of the cores waits for nothing."""
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
        if limit >= ANY_LOAD or most_s <= 0:
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


class Patience:
    """How long a worker waits for quiet cores: after a wait in vain it only looks, until the cores are quiet again."""

    def __init__(self) -> None:
        self._was_in_vain = False

    def wait(self, quiet: Quiet, limit: float, *, most_s: float) -> None:
        """Wait for quiet cores, at most for so long."""
        most_s = min(most_s, FIRST_LOOK_S) if self._was_in_vain else most_s
        self._was_in_vain = not quiet.wait(limit, most_s=most_s)


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
