"""Time the CUDA lane after checking it: no speed is printed unless every output is within its limits.

Usage: python -m kernels.mamba3_mimo.cuda.bench [--kernels]
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from kernels.mamba3_mimo.cuda.check import Case, check, make_inputs
from kernels.mamba3_mimo.cuda.scan import Scan, chunk_parallel_cuda
from kernels.mamba3_mimo.cuda.variant import Variant

CHECKED = Case(B=2, S=1024, H=16)
"""What must be right before anything is timed."""

SHAPES = {
    "B8 S8192 H16": (Case(B=8, S=8192, H=16), 2.950, 15.71),
    "B1 S65536 H16": (Case(B=1, S=65536, H=16), 23.16, 119.1),
}
"""Name -> (case, official forward ms, official forward+backward ms on the same chip model)."""


def median_ms(run: Callable[[], object], repeats: int = 20) -> float:
    """Return the median time of `run` in milliseconds, by CUDA events on a busy stream, after three warm-up runs."""
    marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 4)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    times: list[float] = [begin.elapsed_time(end) for begin, end in pairwise(marks)]
    return statistics.median(times[3:])


def time_shape(case: Case, variant: Variant) -> tuple[float, float, float]:
    """Return (forward ms, forward+backward ms, peak GiB)."""
    inputs = make_inputs(case)
    leaves = tuple(t.requires_grad_() for t in inputs.tensors())
    grad_out = torch.randn_like(inputs.v)
    forward = median_ms(lambda: Scan(inputs, variant).forward())

    def both() -> None:
        out, _ = chunk_parallel_cuda(inputs, variant)
        torch.autograd.grad(out, leaves, grad_out)

    both()
    torch.cuda.reset_peak_memory_stats()
    return forward, median_ms(both), torch.cuda.max_memory_allocated() / 2**30


def kernel_times(case: Case, variant: Variant) -> dict[str, float]:
    """Return the milliseconds of every GPU kernel of one forward+backward, by the profiler."""
    inputs = make_inputs(case)
    leaves = tuple(t.requires_grad_() for t in inputs.tensors())
    grad_out = torch.randn_like(inputs.v)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            out, _ = chunk_parallel_cuda(inputs, variant)
            torch.autograd.grad(out, leaves, grad_out)
        torch.cuda.synchronize()
    events = [e for e in profile.key_averages() if e.device_time_total > 0]
    return {e.key[:60]: e.device_time_total / 5000 for e in sorted(events, key=lambda e: -e.device_time_total)}


def main() -> int:
    """Check, then time; returns 1 when the check fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", action="store_true", help="also print the time of every kernel")
    arguments = parser.parse_args()
    variant = Variant()
    errors, bad = check(CHECKED, variant)
    sys.stdout.write("".join(f"  {n:8s} global {a:.5f} row {b:.5f}\n" for n, (a, b) in errors.items()))
    if bad:
        sys.stdout.write(f"over the limits: {', '.join(bad)}; no speed is measured\n")
        return 1
    for name, (case, official_forward, official_both) in SHAPES.items():
        forward, both, peak = time_shape(case, variant)
        sys.stdout.write(
            f"{name}: forward {forward:.3f} ms ({official_forward / forward:.2f}x), forward+backward {both:.3f} ms "
            f"({official_both / both:.2f}x), peak {peak:.2f} GiB\n"
        )
        if arguments.kernels:
            for key, ms in kernel_times(case, variant).items():
                sys.stdout.write(f"    {ms:8.3f} ms  {key}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
