"""Times of the matrix-state recurrence on this GPU: its kernels for several sizes, and the loop over tokens for one.

Usage: python -m tests.bench.recurrence OUT

One JSON object: size -> median and worst milliseconds of the forward pass alone, and of both passes, and their peak
memory in GiB. The first size is that of recipe nam56r. Stops without a time if the kernels' results are wrong.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ablate.kernels import recurrence as kernels
from ablate.model.back_ends import problem
from ablate.model.layers.recurrence import recurrence as loop

SIZES = (
    (4, 4096, 44, 64, 16),
    (1, 4096, 44, 64, 16),
    (8, 4096, 44, 64, 16),
    (4, 4096, 16, 128, 16),
    (1, 16384, 44, 64, 16),
)
"""Rows, tokens, heads, key width, value width."""


def timed(run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return the median and the largest milliseconds of a call."""
    run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2], max(times)


def measured(walk: Callable[..., Tensor], size: tuple[int, ...], repeats: int) -> dict[str, object]:
    batch, length, heads, key, value = size
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    rows = (batch, length)
    operands = [normal(*rows, key), normal(*rows, key), normal(*rows, heads, value)]
    operands += [torch.sigmoid(2 * normal(*rows, heads)), torch.eye(value, device="cuda").repeat(heads, 1, 1)]
    leaves, upstream = [operand.requires_grad_() for operand in operands], normal(*rows, heads, value)
    starts = torch.zeros(rows, dtype=torch.bool, device="cuda")

    def forward() -> None:
        with torch.no_grad():
            walk(*leaves, starts)

    torch.cuda.reset_peak_memory_stats()
    passes = {
        "forward_ms": timed(forward, repeats),
        "both_ms": timed(lambda: torch.autograd.grad(walk(*leaves, starts), leaves, upstream), repeats),
    }
    return passes | {"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)}


def main() -> None:
    reason = problem("recurrence=fused", torch.device("cuda"))
    if reason is not None:
        raise SystemExit(reason)
    torch.use_deterministic_algorithms(False)
    results = {f"fused {size}": measured(kernels.recurrence, size, 9) for size in SIZES}
    results[f"loop {SIZES[0]}"] = measured(loop, SIZES[0], 1)
    Path(sys.argv[1]).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
