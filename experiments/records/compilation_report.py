"""What a compilation for a device that is not there found out: the part of a receipt that a compiling node class fills.

Nothing was executed, so there are no seconds of steps and no losses in it. Everything but the two durations is the same
for every repetition with the same versions.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from experiments.documents import Frozen
from model.measurements import OmitNone

Bytes: TypeAlias = Annotated[int, Field(ge=0)]


class HbmPlan(Frozen):
    """How the compiler laid out one chip's memory, in bytes."""

    argument_bytes: Bytes
    """Parameters, optimiser state and batch."""
    output_bytes: Bytes
    alias_bytes: Bytes
    """Outputs that lie in the place of arguments."""
    temp_bytes: Bytes
    """Activations, gradients and everything else that lives during a step."""
    code_bytes: Bytes
    """The program; not in the peak."""
    peak_bytes: Bytes
    """argument + output - alias + temp: an estimate, without the program and without fragmentation."""


class Overflow(Frozen):
    """Why the compiler refused: a memory that the step does not fit into."""

    memory: Literal["hbm", "vmem"]
    """The chip's main memory, or the on-chip memory of one kernel."""
    needed_bytes: Bytes
    """As the compiler says it, rounded by it to hundredths of its unit."""
    available_bytes: Bytes


class CompilationReport(Frozen):
    """One training step compiled for a topology."""

    topology: str
    """Chips by the compiler's name, for example "v6e:2x2"."""
    device_kind: str
    chips: Annotated[int, Field(ge=1)]
    """Chips that the step is spread over."""
    versions: Mapping[str, str]
    """libtpu, jax, jaxlib, torch, torch_xla as they compiled; other versions give other numbers."""
    hlo_digest: str
    """Of the lowered module, without paths of source files: equal for equal programs."""
    instructions: Annotated[int, Field(ge=1)]
    """Of the lowered module, before the compiler's own passes."""
    custom_calls: Annotated[int, Field(ge=0)]
    """Kernels that the module calls."""
    kernels: Mapping[str, int]
    """Calls by the kernel's name."""
    matmul_flops: OmitNone[int] = None
    """FLOPs of all matrix products outside of kernels, loops times their trips; recomputation counts."""
    hbm: OmitNone[HbmPlan] = None
    """None when the step does not fit."""
    overflow: OmitNone[Overflow] = None
    collectives: OmitNone[Mapping[str, int]] = None
    """Collectives of the compiled program by kind."""
    compiled_calls: OmitNone[Annotated[int, Field(ge=0)]] = None
    """Kernels that the compiled program calls; None where it cannot be printed."""
    compiler_flops: OmitNone[Annotated[float, Field(ge=0)]] = None
    """The compiler's own count for one chip: a loop's body once, of a kernel what it declares."""
    compiler_bytes: OmitNone[Annotated[float, Field(ge=0)]] = None
    """Bytes that the compiler counts between chip and memory; a loop's body once."""
    trace_s: Annotated[float, Field(ge=0)]
    """Seconds of tracing and lowering; those of compiling are the receipt's `compile_s`."""


def report_problems(report: CompilationReport) -> Iterator[str]:
    """Yield what in a report contradicts the rest of it."""
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
        yield "compilation.overflow needs no more than there is"


def peak_bytes(plan: HbmPlan) -> int:
    """Return the peak that the parts of `plan` give."""
    return plan.argument_bytes + plan.output_bytes - plan.alias_bytes + plan.temp_bytes
