"""Three kinds of times of a pass: the sum of its GPU kernels, the replay of a CUDA graph, and single calls.

The sum omits gaps between kernels, a graph omits the host, calls omit nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], object]


def by_events(run: Run, repeats: int) -> list[float]:
    """Return `repeats` times in ms by CUDA events on a busy stream."""
    marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 2)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in pairwise(marks[1:])]


def by_kernel(run: Run, repeats: int) -> dict[str, float]:
    """Return the milliseconds of every GPU kernel of one run, including copies and fills, slowest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    total = {event.key: event.device_time_total / 1000 / repeats for event in profile.key_averages()}
    return {kernel: ms for kernel, ms in sorted(total.items(), key=lambda item: -item[1]) if ms > 0}


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A run as a CUDA graph."""

    replay: Run
    results: tuple[Tensor, ...]
    """Results of the captured run, into which a replay writes."""


def captured(run: Callable[[], tuple[Tensor, ...]]) -> Captured:
    """Return a warmed-up run as a CUDA graph. Raises RuntimeError if it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return Captured(replay=graph.replay, results=results)


def ceilings(repeats: int = 10) -> dict[str, float]:
    """Return this GPU's bytes per second in a copy, and FLOPs per second in a bf16 product of 8192^3."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        target.copy_(source)
        square @ square
    copy = min(by_events(lambda: target.copy_(source), repeats))
    product = min(by_events(lambda: square @ square, repeats))
    return {"bytes_per_s": 1e3 * 2 * source.nbytes / copy, "flops_per_s": 1e3 * 2 * 8192**3 / product}
