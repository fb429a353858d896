"""One more step under torch's profiler, after all measurements: the kernels that ran, and what ranks exchanged.

Code records which implementation it called. That call can be answered by another kernel: torch chooses one by the
shapes, and a library can replace another's. `attest` replaces such a fact by the contradiction, so that the gate is not
live.

An exchange lasts from its start on this rank to its end, so it includes the wait for ranks that come later. It is
exposed while this rank computes nothing else: no other kernel of its GPU runs, or no operator of its processor.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ablate.kernels import facts
from ablate.kernels.facts import Fact
from ablate.model.errors import MeasurementError
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


EXCHANGE = re.compile(r"(gloo|nccl):\w+")
"""Names of the host's records of exchanges, with the shapes of what this rank gives."""
NCCL_KERNEL = re.compile(r"nccl\w*Kernel")
OPERATOR = "aten::"
"""Prefix of torch's operators, none of which waits for another rank."""
ANNOTATION = re.compile(r"FSDP::|(gloo|nccl):\w|ProfilerStep#|Optimizer\.")
"""Beginnings of names of a GPU's records that are no kernels: spans that the host has marked."""

BYTES = {
    "float": 4,
    "double": 8,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "int": 4,
    "long": 8,
    "long int": 8,
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
}
"""Size of an element by torch's name of its type."""

Span = tuple[int, int]
"""Begin and end in ns."""


class Communication(NamedTuple):
    """The exchanges of one step of one rank."""

    seconds: float
    """Time in which an exchange ran."""
    exposed_s: float
    """Part of it in which nothing else ran."""
    num_bytes: int
    """Bytes of the tensors that this rank gave to exchanges."""


def communication_of(run: Callable[[], None], device: torch.device) -> Communication:
    """Run a step and return its exchanges. Raises MeasurementError if the profiler saw none, or an unknown type."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, record_shapes=True) as session:
        run()
    profiler = session.profiler
    events = [] if profiler is None else profiler.kineto_results.events()
    of_host = [event for event in events if event.device_type() == DeviceType.CPU]
    exchanges = [event for event in of_host if EXCHANGE.fullmatch(event.name())]
    if on_gpu:
        kernels = [event for event in events if event.device_type() == DeviceType.CUDA]
        running = [event for event in kernels if NCCL_KERNEL.search(event.name())]
        others = [e for e in kernels if not NCCL_KERNEL.search(e.name()) and not ANNOTATION.match(e.name())]
    else:
        running, others = exchanges, [event for event in of_host if event.name().startswith(OPERATOR)]
    if not running:
        raise MeasurementError("torch's profiler saw no exchange between the ranks of the step")
    during, computing = union(map(_span, running)), union(map(_span, others))
    hidden = sum(overlap(span, computing) for span in during)
    total = sum(end - begin for begin, end in during)
    num_bytes = sum(_bytes(event.shapes(), event.dtypes()) for event in exchanges)
    return Communication(total / 1e9, (total - hidden) / 1e9, num_bytes)


def _span(event: "torch._C._autograd._KinetoEvent") -> Span:
    return event.start_ns(), event.start_ns() + event.duration_ns()


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the same moments as spans that do not overlap, in order."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def overlap(span: Span, others: Iterable[Span]) -> int:
    """Return how long `span` overlaps spans that do not overlap each other."""
    return sum(max(0, min(span[1], end) - max(span[0], begin)) for begin, end in others)


def _bytes(shapes: Iterable[list[int]], dtypes: Iterable[str]) -> int:
    total = 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        if dtype not in BYTES:
            raise MeasurementError(f"torch's profiler names an exchanged type {dtype!r}; known: {', '.join(BYTES)}")
        total += BYTES[dtype] * torch.Size(shape).numel()
    return total
