"""Read a profiled step of a program: its kernels, and what ran when.

The module `ablate` imports this one in trials only. It needs the standard library only and Python 3.9 or newer.
"""

import math
from typing import Any

_MOST_KERNELS = 400
"""Most rows of the kernel table; the rest is added up in one row."""
REST = "(all others)"
"""Name of that row."""
_MOST_EVENTS, _MOST_TRACKS, _MOST_MOMENTS, _LONGEST_NAME = 4000, 64, 400, 120
"""Limits of a step over time, as in ablate.model.measurements.StepTrace."""


def kernel_table(averages: Any) -> list[tuple[str, int, float]]:
    """Return [name, count, microseconds] of the device's kernels, or of the operators where the CPU computes."""
    rows: list[tuple[str, int, float]] = []
    for on_device in (True, False):
        for entry in averages:
            device = str(getattr(entry, "device_type", "")).rpartition(".")[2] != "CPU"
            spent = entry.self_device_time_total if on_device else entry.self_cpu_time_total
            if device == on_device and spent > 0 and not getattr(entry, "is_user_annotation", False):
                rows.append((str(entry.key)[:300], int(entry.count), round(float(spent), 3)))
        if rows:
            break
    rows.sort(key=lambda row: (-row[2], row[0]))
    rest = rows[_MOST_KERNELS:]
    if rest:
        rows[_MOST_KERNELS:] = [(REST, sum(row[1] for row in rest), math.fsum(row[2] for row in rest))]
    return rows


def step_trace(profile: Any) -> dict[str, Any]:
    """Return the profiled step over time, as ablate.model.measurements.StepTrace stores it.

    The device's kernels come before the processor's operators where not all fit, and longer ones before shorter ones.
    """
    spans, changes = [], []
    for event in profile.profiler.kineto_results.events():
        start = event.start_ns() / 1e3 if hasattr(event, "start_ns") else float(event.start_us())
        us = event.duration_ns() / 1e3 if hasattr(event, "duration_ns") else float(event.duration_us())
        device = str(event.device_type()).rpartition(".")[2]
        if event.name() == "[memory]":
            changes.append((start, device != "CPU", int(event.nbytes())))
        elif us > 0:
            thread = f"processor, thread {event.start_thread_id()}"
            stream = f"{device} {event.device_index()}, stream {event.device_resource_id()}"
            spans.append(
                (device == "CPU", -us, start, str(event.name())[:_LONGEST_NAME], thread if device == "CPU" else stream)
            )
    spans.sort()
    tracks = list(dict.fromkeys(span[4] for span in spans))[:_MOST_TRACKS]
    shown = sorted((span for span in spans if span[4] in tracks), key=lambda span: span[:2])[:_MOST_EVENTS]
    names = list(dict.fromkeys(span[3] for span in shown))
    places = {name: place for place, name in enumerate(names)}
    origin = min([*(span[2] for span in shown), *(change[0] for change in changes)], default=0.0)
    return {
        "names": names,
        "tracks": tracks,
        "events": [
            [places[name], tracks.index(track), round(start - origin, 3), round(-less_us, 3)]
            for _on_cpu, less_us, start, name, track in sorted(shown, key=lambda span: (span[2], span[1]))
        ],
        "left_out": len(spans) - len(shown),
        "memory": _memory_over_time(changes, origin),
    }


def _memory_over_time(changes: list[tuple[float, bool, int]], origin: float) -> list[list[Any]]:
    """Return [microseconds, bytes above those at the start]; where they are many, the largest of each part of them."""
    on_device = any(change[1] for change in changes)
    total, moments = 0, []
    for start, device, num_bytes in sorted(changes):
        if device == on_device:
            total += num_bytes
            moments.append([round(start - origin, 3), total])
    part = math.ceil(len(moments) / (_MOST_MOMENTS - 1)) or 1
    thinned = [max(moments[first : first + part], key=lambda one: one[1]) for first in range(0, len(moments), part)]
    return thinned if not moments or thinned[-1] == moments[-1] else [*thinned, moments[-1]]
