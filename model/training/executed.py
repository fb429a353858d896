"""The kernels that a GPU executed in one training step, by their names, against the facts that the code recorded.

Code records which implementation it called. That call can be answered by another kernel: torch chooses one by the
shapes, and a library can replace another's. `attest` replaces such a fact by the contradiction, so that the gate is not
live. It runs one more step after all measurements, under torch's profiler.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

from torch.profiler import ProfilerActivity, profile

from ablate.kernels import facts
from ablate.kernels.facts import Fact
from ablate.model.facts import ModelFact

ATTENTION_KERNELS: Mapping[str, tuple[str, str]] = {
    "flash": (r"pytorch_flash::flash_fwd", r"pytorch_flash::flash_bwd"),
    "fa4": (r"flash_attncute.*FlashAttentionForward", r"flash_attncute.*FlashAttentionBackward"),
    "cudnn": (r"cudnn.*(sdpa|flash).*fprop", r"cudnn.*(sdpa|flash).*bprop"),
    "flex": (r"triton_.*flex_attention(?!_backward)", r"triton_.*flex_attention_backward"),
    "efficient": (r"fmha_cutlassF", r"fmha_cutlassB"),
}
"""Implementation of attention -> patterns of its kernels in the forward and in the backward pass. sdpa may choose
flash, cudnn, efficient, or products of its own."""

OTHER_KERNELS: Mapping[ModelFact, Mapping[str, str]] = {
    ModelFact.LOSS: {"quack": r"quackcross_entropy", "liger": r"liger_cross_entropy"},
    ModelFact.ADAMW_UPDATE: {"fused": r"FusedAdam", "clip_in_update": r"FusedAdam"},
    ModelFact.NORM_KERNELS: {"quack": r"quackrmsnorm"},
}
"""Fact -> its values that have a kernel of their own, with the pattern of its name."""

FLOAT8_KERNEL = r"nvjet.*_[qr][qr]t|cutlass.*(e4m3|e5m2)"
"""Pattern of the names of matrix products in float8: cuBLAS writes q for an operand in e4m3 and r for one in e5m2."""

_SDPA_CHOOSES = {"flash", "cudnn", "efficient"}


Kernels: TypeAlias = Mapping[str, int]
"""Name of a kernel -> how often it ran."""


def kernels_of(run: Callable[[], None]) -> Kernels:
    """Run `run` and return the kernels that the GPU executed; none where the profiler sees none."""
    with profile(activities=[ProfilerActivity.CUDA]) as session:
        run()
    return {event.key: event.count for event in session.key_averages() if event.device_time_total > 0}


def attest(kernels: Kernels, observed: facts.Facts, *, projections: int) -> None:
    """Correct the facts `observed` by the kernels of a step. Without kernels they stay.

    `projections` is the number of linear maps in the blocks.
    """
    if kernels:
        observed.update(dict(_corrections(kernels, observed, projections)))


def _corrections(names: Kernels, observed: Mapping[str, Fact], projections: int) -> Iterator[tuple[str, Fact]]:
    in_float8 = sum(count for name, count in names.items() if re.search(FLOAT8_KERNEL, name))
    wanted = {"fp8_forward": projections, "fp8": 2 * projections}.get(str(observed.get(ModelFact.PROJECTIONS)), 0)
    if in_float8 != wanted:
        text = f"not on the GPU: {in_float8} products in float8 in a step, {wanted} were asked for"
        yield ModelFact.PROJECTIONS, text
    if ModelFact.ATTENTION in observed:
        recorded = str(observed[ModelFact.ATTENTION])
        ran = sorted(name for name, patterns in ATTENTION_KERNELS.items() if any(_seen(p, names) for p in patterns))
        yield ModelFact.ATTENTION_KERNELS, ", ".join(ran) or "none of a known name"
        problem = _attention_problem(recorded, ran, names)
        if problem is not None:
            yield ModelFact.ATTENTION, problem
    for fact, patterns in OTHER_KERNELS.items():
        recorded = str(observed.get(fact))
        if recorded in patterns and not _seen(patterns[recorded], names):
            yield fact, f"not on the GPU: the code called {recorded}, but no kernel of it ran"


def _attention_problem(recorded: str, ran: Iterable[str], names: Iterable[str]) -> str | None:
    allowed = _SDPA_CHOOSES if recorded == "sdpa" else {recorded}
    others = [name for name in ran if name not in allowed]
    if others:
        return f"not on the GPU: the code called {recorded}, and kernels of {', '.join(others)} ran"
    for direction, pattern in zip(("forward", "backward"), ATTENTION_KERNELS.get(recorded, ()), strict=False):
        if not _seen(pattern, names):
            return f"not on the GPU: the code called {recorded}, but no {direction} kernel of it ran"
    return None


def _seen(pattern: str, names: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for name in names)
