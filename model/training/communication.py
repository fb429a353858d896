"""What the ranks of a step exchange, and when: one more step under torch's profiler, after all measurements.

An exchange lasts from its start on this rank to its end, so it includes the wait for ranks that come later. It is
exposed while this rank computes nothing else: no other kernel of its GPU runs, or no operator of its processor.
"""

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ablate.model.errors import MeasurementError

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
