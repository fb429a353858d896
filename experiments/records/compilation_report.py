"""The compilation report of a receipt: results of compiling a step for an absent device.

Nothing is executed, so there are no step times and no losses. All values except the two durations are the same in every
repetition with the same versions.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from ablate.experiments.documents import Frozen
from ablate.model.measurements import OmitNone

Bytes: TypeAlias = Annotated[int, Field(ge=0)]


class HbmPlan(Frozen):
    """The compiler's memory plan of one chip, in bytes."""

    argument_bytes: Bytes
    """Parameters, optimiser state and batch."""
    output_bytes: Bytes
    alias_bytes: Bytes
    """Outputs that reuse the memory of arguments."""
    temp_bytes: Bytes
    """Activations, gradients and all other data that live during a step."""
    code_bytes: Bytes
    """The program; not part of the peak."""
    peak_bytes: Bytes
    """argument + output - alias + temp: an estimate without the program and without fragmentation."""


class Overflow(Frozen):
    """Memory that is too small for the step, so the compiler rejected it."""

    memory: Literal["hbm", "vmem"]
    """The chip's main memory, or the on-chip memory of one kernel."""
    needed_bytes: Bytes
    """As reported by the compiler, which rounds to hundredths of its unit."""
    available_bytes: Bytes


class CompilationReport(Frozen):
    """One training step compiled for a topology."""

    topology: str
    """Compiler's name of the chips, such as "v6e:2x2"."""
    device_kind: str
    chips: Annotated[int, Field(ge=1)]
    """Chips that the step is spread over."""
    versions: Mapping[str, str]
    """Of libtpu, jax, jaxlib, torch and torch_xla; other versions give other numbers."""
    hlo_digest: str
    """Of the lowered module without source paths, so equal programs have equal digests."""
    instructions: Annotated[int, Field(ge=1)]
    """Of the lowered module, before the compiler's own passes."""
    custom_calls: Annotated[int, Field(ge=0)]
    """Kernels that the module calls."""
    kernels: Mapping[str, int]
    """Calls by kernel name."""
    matmul_flops: OmitNone[int] = None
    """FLOPs of all matrix products outside kernels, times the trip counts of loops; recomputation counts."""
    hbm: OmitNone[HbmPlan] = None
    """None when the step does not fit."""
    overflow: OmitNone[Overflow] = None
    collectives: OmitNone[Mapping[str, int]] = None
    """Collectives of the compiled program by kind."""
    compiled_calls: OmitNone[Annotated[int, Field(ge=0)]] = None
    """Kernels that the compiled program calls; None where the program cannot be printed."""
    compiler_flops: OmitNone[Annotated[float, Field(ge=0)]] = None
    """The compiler's count for one chip: loop bodies once, kernels as they declare."""
    compiler_bytes: OmitNone[Annotated[float, Field(ge=0)]] = None
    """The compiler's count of bytes between chip and memory; loop bodies once."""
    trace_s: Annotated[float, Field(ge=0)]
    """Seconds of tracing and lowering; `compile_s` of the receipt has those of compiling."""


def report_problems(report: CompilationReport) -> Iterator[str]:
    """Find contradictions inside a report."""
    calls = sum(report.kernels.values())
    if report.custom_calls != calls:
        yield f"compilation.custom_calls is {report.custom_calls}; the kernels give {calls}"
    if report.compiled_calls is not None and report.compiled_calls != calls:
        yield f"compilation: the module calls {calls} kernels, the compiled program {report.compiled_calls}"
    if report.hbm is None and report.overflow is None:
        yield "compilation has neither a memory plan nor an overflow"
    if report.hbm is not None and report.overflow is not None:
        yield "compilation has both a memory plan and an overflow"
    if report.hbm is not None and report.hbm.peak_bytes != peak_bytes(report.hbm):
        yield f"compilation.hbm.peak_bytes is {report.hbm.peak_bytes}; its parts give {peak_bytes(report.hbm)}"
    if report.overflow is not None and report.overflow.needed_bytes <= report.overflow.available_bytes:
        yield "compilation.overflow needs no more than is available"


def peak_bytes(plan: HbmPlan) -> int:
    """Return the peak that follows from the parts of `plan`."""
    return plan.argument_bytes + plan.output_bytes - plan.alias_bytes + plan.temp_bytes
