"""What else ran on this machine during a trial: processor time of every process, before and after."""

from collections.abc import Collection, Mapping

import psutil

from experiments.records.receipts import ForeignProcess

MOST = 3
MIN_CPU_S = 0.05
"""Processes below are not worth a name."""

ProcessTimes = Mapping[tuple[int, float], tuple[str, float]]
"""By process id and start: name and processor seconds."""


def process_times() -> ProcessTimes:
    """Return the processor time of every process that can be seen."""
    found = {}
    for process in psutil.process_iter(["name", "cpu_times", "create_time"]):
        info = process.info
        if info["cpu_times"] is not None and info["create_time"] is not None:
            seconds = info["cpu_times"].user + info["cpu_times"].system
            found[process.pid, info["create_time"]] = (info["name"] or "?", seconds)
    return found


def busiest(before: ProcessTimes, after: ProcessTimes, *, but: Collection[int] = ()) -> tuple[ForeignProcess, ...]:
    """Return the processes that used most processor time in between, `but` for these; most first.

    A process that ended meanwhile is not seen; the load of the cores counts it all the same.
    """
    used = [
        ForeignProcess(pid=key[0], name=name, cpu_s=round(seconds - before.get(key, ("", 0.0))[1], 2))
        for key, (name, seconds) in after.items()
        if key[0] not in but
    ]
    worth = [one for one in used if one.cpu_s >= MIN_CPU_S]
    return tuple(sorted(worth, key=lambda one: -one.cpu_s)[:MOST])
