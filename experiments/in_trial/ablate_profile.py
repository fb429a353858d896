"""Read a profiled step of a program: its kernels, and what ran when.

The module `ablate` imports this one in trials only. It needs the standard library only and Python 3.9 or newer.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Optional

_MOST_KERNELS = 400
"""Most rows of the kernel table; the rest is added up in one row."""
REST = "(all others)"
"""Name of that row."""
_ROWS_OF_MESSAGE, _KERNELS_OF_MESSAGE = 500, 60
"""Most rows in one message, which keeps it far below the kernel's limit of a datagram."""
_MOST_EVENTS, _MOST_TRACKS, _MOST_MOMENTS, _LONGEST_NAME = 4000, 64, 400, 120
"""Limits of a step over time, as in ablate.model.measurements.StepTrace."""
LAUNCH = ("registers", "shared_bytes", "block", "grid")
"""Facts of one launch of a kernel."""
_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Operators that multiply matrices, and the place of the left one among their arguments."""
_HALVES = ("c10::BFloat16", "c10::Half")
"""Torch's names of the types with two bytes, whose products have one peak on each device."""
_ESTIMATED_BYTES = 48 * 1024
"""Most shared memory of a block for which torch estimates the occupancy; it says 0 for more."""


def profiler(torch: Any) -> Any:
    """Return torch's profiler for one step. From torch 2.11 on it knows how kernels of a GPU were launched."""
    if not torch.cuda.is_available():
        return torch.profiler.profile(profile_memory=True)
    try:
        config = torch._C._profiler._ExperimentalConfig(expose_kineto_event_metadata=True)
    except (AttributeError, TypeError):
        config = None
    return torch.profiler.profile(profile_memory=True, record_shapes=True, experimental_config=config)


def messages(profile: Any, torch: Any, *, traced: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the messages about a profiled step: its kernels with what is known of them, and the step over time."""
    table = kernel_table(profile.key_averages())
    facts = kernel_facts(profile, [row[0] for row in table], torch.cuda.get_device_properties)
    rows = [[*row, facts.get(row[0], {})] for row in table]
    for first in range(0, len(rows), _KERNELS_OF_MESSAGE):
        yield "kernels", {"rows": rows[first : first + _KERNELS_OF_MESSAGE]}
    if traced:
        yield from trace_messages(step_trace(profile))


def trace_messages(trace: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a step over time in pieces; the last one says so."""
    for part in ("names", "tracks", "events", "memory"):
        for first in range(0, len(trace[part]), _ROWS_OF_MESSAGE):
            yield "trace", {"part": part, "rows": trace[part][first : first + _ROWS_OF_MESSAGE]}
    yield "trace", {"part": "left_out", "rows": [trace["left_out"]]}


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


def kernel_facts(profile: Any, names: Collection[str], gpu: Callable[[int], Any]) -> dict[str, dict[str, Any]]:
    """Return what is known of these kernels, each as ablate.model.measurements.KernelFacts.

    `gpu` returns torch's properties of a device.
    """
    events = [event for event in profile.profiler.kineto_results.events() if _us(event) > 0]
    products = {event.correlation_id(): product for event in events if (product := _product(event)) is not None}
    calls: dict[str, list[tuple[float, tuple[Any, ...], Optional[float]]]] = {}
    parts: dict[int, list[tuple[float, str]]] = {}
    for event in events:
        name, us = str(event.name())[:300], _us(event)
        if _device(event) != "CPU":
            parts.setdefault(event.linked_correlation_id(), []).append((us, name))
            calls.setdefault(name, []).append((us, *_launch(event, gpu)))
    facts = {name: _launches(calls[name]) for name in names if name in calls}
    for operator, (flops, num_bytes) in products.items():
        longest = max(parts.get(operator, [(0.0, "")]))[1]
        if longest in facts:
            us = math.fsum(part[0] for part in parts[operator])
            for key, value in (("product_flops", flops), ("product_bytes", num_bytes), ("product_us", us)):
                facts[longest][key] = round(facts[longest].get(key, 0) + value, 3)
    return {name: values for name, values in facts.items() if values}


def _launches(calls: list[tuple[float, tuple[Any, ...], Optional[float]]]) -> dict[str, Any]:
    """Return the launch with the most time, the number of different ones, and the mean occupancy over the time."""
    longest, launches = longest_launch((us, launch) for us, launch, _occupancy_of_call in calls)
    facts = dict(zip(LAUNCH, longest))  # noqa: B905 - Python 3.9 has no strict
    if any(value is not None for value in longest):
        facts["launches"] = launches
    if all(occupancy is not None for _us_of_call, _launch_of_call, occupancy in calls):
        weighted = math.fsum(us * (occupancy or 0.0) for us, _launch_of_call, occupancy in calls)
        facts["occupancy"] = round(weighted / math.fsum(call[0] for call in calls), 4)
    return {key: value for key, value in facts.items() if value is not None}


def longest_launch(spent: Iterable[tuple[float, tuple[Any, ...]]]) -> tuple[tuple[Any, ...], int]:
    """Return the launch with the most time of calls with their microseconds, and the number of different launches."""
    us_of_launch: dict[tuple[Any, ...], float] = {}
    for us, launch in spent:
        us_of_launch[launch] = us_of_launch.get(launch, 0.0) + us
    return max(us_of_launch, key=lambda launch: us_of_launch[launch]), len(us_of_launch)


def _launch(event: Any, gpu: Callable[[int], Any]) -> tuple[tuple[Any, ...], Optional[float]]:
    """Return registers per thread, shared memory, block and grid of a kernel's call, and its occupancy."""
    try:
        metadata = json.loads(f"{{{event.metadata_json()}}}")
    except (AttributeError, ValueError):
        metadata = {}
    registers, shared = (_whole(metadata.get(key)) for key in ("registers per thread", "shared memory"))
    block, grid = (_sizes(metadata.get(key)) for key in ("block", "grid"))
    estimate = metadata.get("est. achieved occupancy %")
    if registers is None or shared is None or block is None or grid is None:
        occupancy = None
    elif shared > _ESTIMATED_BYTES:
        occupancy = _occupancy(registers, shared, math.prod(block), math.prod(grid), gpu(event.device_index()))
    else:
        occupancy = estimate / 100 if isinstance(estimate, (int, float)) and 0 <= estimate <= 100 else None
    return (registers, shared, block, grid), occupancy


def _whole(value: Any) -> Optional[int]:
    return value if type(value) is int and 0 <= value < 2**31 else None


def _sizes(value: Any) -> Optional[tuple[int, ...]]:
    sizes = tuple(size for size in value if _whole(size)) if isinstance(value, list) else ()
    return sizes if len(sizes) == 3 == len(value) else None


def _occupancy(registers: int, shared: int, threads: int, blocks: int, gpu: Any) -> Optional[float]:
    """Return the share of a multiprocessor's threads that its blocks have, with more than 48 KiB of shared memory each.

    A multiprocessor has four parts with a quarter of the registers. They go to warps of 32 threads by 256, and shared
    memory to blocks by 128 bytes, with 1 KiB for each block itself.
    """
    warps = -(-threads // 32)
    of_warp = -(-registers * 32 // 256) * 256
    most = gpu.max_threads_per_multi_processor
    by_registers = 4 * (gpu.regs_per_multiprocessor // 4 // of_warp) // warps if of_warp else blocks
    by_memory = gpu.shared_memory_per_multiprocessor // (-(-(shared + 1024) // 128) * 128)
    resident = min(by_registers, by_memory, most // (32 * warps), blocks / gpu.multi_processor_count)
    return resident * threads / most if resident > 0 else None


def _product(event: Any) -> Optional[tuple[int, int]]:
    """Return FLOPs and bytes of a product of 16-bit matrices, each matrix and the result counted once; else None."""
    place = _PRODUCTS.get(event.name())
    if place is None or _device(event) != "CPU":
        return None
    matrices, types = event.shapes()[place : place + 2], event.dtypes()[place : place + 2]
    if [len(matrix) >= 2 for matrix in matrices] != [True, True] or not all(one in _HALVES for one in types):
        return None
    left, right = matrices
    batch, (rows, inner), columns = math.prod(left[:-2]), left[-2:], right[-1]
    flops, num_bytes = 2 * batch * rows * inner * columns, 2 * batch * (rows * (inner + columns) + inner * columns)
    return (flops, num_bytes) if flops else None


def step_trace(profile: Any) -> dict[str, Any]:
    """Return the profiled step over time, as ablate.model.measurements.StepTrace stores it.

    The device's kernels come before the processor's operators where not all fit, and longer ones before shorter ones.
    """
    spans, changes = [], []
    for event in profile.profiler.kineto_results.events():
        start = event.start_ns() / 1e3 if hasattr(event, "start_ns") else float(event.start_us())
        us, device = _us(event), _device(event)
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


def _us(event: Any) -> float:
    return event.duration_ns() / 1e3 if hasattr(event, "duration_ns") else float(event.duration_us())


def _device(event: Any) -> str:
    return str(event.device_type()).rpartition(".")[2]


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
