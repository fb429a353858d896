"""The measurements of a trial: each one is declared here once. Torch-free.

The trainer returns them, the worker reads them from the trainer's result file, and the receipt stores them. A field
with a `Metric` in its annotation is also a metric of verdicts. A new measurement needs one line in `Measurements`. Its
type is `OmitNone[...]` with default None, because receipts written before it must keep their digests.
"""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator

from ablate.kernels.facts import Fact

GIB = 2**30

Phase: TypeAlias = Literal["compile", "warmup", "timed"]

_T = TypeVar("_T")

OmitNone: TypeAlias = Annotated[_T | None, Field(exclude_if=lambda value: value is None)]
"""None means not reported, which is not 0. JSON omits the field then, so the digest shows the difference."""


@dataclass(frozen=True)
class Metric:
    """How a number of a receipt is named, compared and judged."""

    name: str
    """Its name in specs."""
    label: str
    """Its name in reports."""
    unit: str
    field: str = ""
    """Dotted path in the receipt (`ablate.experiments.records.receipts.read_metric`); default: the annotated field."""
    _: KW_ONLY
    better: Literal["higher", "lower"] | None = "lower"
    """Direction of improvement; None where neither is one."""
    kind: Literal["ratio", "absolute", "loss"] = "absolute"
    """`ratio`: compared by ln(variant / baseline); `absolute`: by the difference; `loss`: by identity, or by the
    difference over seeds."""
    per: float = 1.0
    """Divisor from the receipt's number to `unit`."""
    source: Literal["training", "compilation", "both", "step", "program"] = "training"
    """Trials that have it: trials of the built-in model that train, trials of a node class that only compiles, or both;
    `step`: trials of the built-in model that train and trials of commands; `program`: trials of commands."""
    per_device: bool = False
    """Whether the receipt's number is divided by the devices of the trial."""
    summed: str | None = None
    """Where `field` is a table: the key whose values are added up over its rows."""
    counted: bool = False
    """Where `field` is a table: whether its rows are counted."""
    alike: Literal["step", "token", "nothing"] = "step"
    """What two arms must have in common before their values are compared: the work of a step, the work of a token, or
    nothing. Nothing is needed where the unit contains the work, or where values only have to be identical."""
    resident_on: tuple[str, ...] = ()
    """Torch device types that report the process's resident set instead, where trials run on the host. A resident set
    also holds libraries and freed pages and differs from run to run, so the metric cannot decide there."""
    named_in_key: bool = False
    """Whether the key of its calibration has its name. A metric of the window shares the key of throughput."""
    cold: bool = False
    """Whether trials start with empty compiler caches on disk where this metric decides."""
    clocked: bool = False
    """Whether a number of a validation curve depends on the clock."""
    decides: Literal["paired", "exact", "curve"] | None = "exact"
    """How it decides as primary metric. `paired`: by a t test over block differences. `exact`: by its value, which must
    be bit-identical whenever one arm runs again with one seed. `curve`: by a t test over seeds, from the validation
    curves of both trials of a block (`ablate.experiments.analysis.curves`). None: it cannot."""


class Step(BaseModel):
    """One optimiser step."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")  # the worker judges them

    index: int
    phase: Phase
    """Step 0 is `compile`; only `timed` steps enter the measured window."""
    seconds: float
    """Wall time of the whole step: reading the batch, forward, backward, update, until the device is done."""
    tokens: int
    """B * S, masked targets included."""
    loss: OmitNone[float] = None
    """Mean cross entropy in nats over valid tokens, before the update; of a command as it reports it, or None."""
    grad_norm: OmitNone[float] = None
    """Global L2 norm before clipping; None for commands."""
    began_s: float
    """Start of the step in seconds since training began, by a clock that is never set."""
    ended_s: float
    """End of the step by the same clock."""
    compilations: int = 0
    """Graphs and kernels compiled or loaded during the step; in a timed step they spoil the window."""
    graphs: OmitNone[int] = None
    """Graphs that XLA executed during the step; another number than 1 in a timed step spoils the window. None on other
    devices."""
    host_operations: OmitNone[tuple[str, ...]] = None
    """Operations of the step that ran on the host in place of XLA's device. Reported like `graphs`; one in a timed step
    spoils the window."""
    clock_mhz: float | None = None
    """Device clock just after the step; None where it cannot be read."""


class Validation(BaseModel):
    """The loss of the validation rows between two steps, by a schedule."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")  # the worker judges it

    step: int
    """Index of the step before it."""
    loss: float
    """Mean cross entropy in nats over the valid tokens of the validation rows."""
    began_s: float
    """Start in seconds since training began, by the clock of the steps."""
    ended_s: float


class _MeasurementsInParts(BaseModel):
    """Measurements that a receipt stores in its memory, environment and summary."""

    peak_reserved_bytes: Annotated[
        int | None,
        Metric(
            "peak_reserved_gib",
            "peak reserved memory",
            "GiB",
            "memory.peak_reserved_bytes",
            per=GIB,
            resident_on=("cpu", "xla"),
            source="step",
        ),
    ] = None
    peak_allocated_bytes: Annotated[
        int | None,
        Metric(
            "peak_allocated_gib",
            "peak allocated memory",
            "GiB",
            "memory.peak_allocated_bytes",
            per=GIB,
            resident_on=("xla",),
            source="step",
        ),
    ] = None
    foreign_load: float | None = None
    """Share of the cores' time that went to other processes, from the warm-up to the window's end; None where the
    system does not report it."""
    stolen_load: float | None = None
    """Part of `foreign_load` that a hypervisor gave to other machines."""
    loss_val: Annotated[
        float | None,
        Metric("loss_val", "validation loss", "nats", "summary.loss_val", kind="loss", alike="nothing"),
    ] = None
    """Mean over the valid tokens of the validation rows after the last step; None when val_rows is 0."""


_Microseconds: TypeAlias = Annotated[float, Field(ge=-1e12, le=1e12)]
_Bytes: TypeAlias = Annotated[int, Field(gt=-(2**62), lt=2**62)]


class StepTrace(BaseModel):
    """One step under torch's profiler over time: kernels and operators, and the memory in tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    names: Annotated[tuple[Annotated[str, Field(max_length=120)], ...], Field(max_length=4000)]
    """Of kernels and operators."""
    tracks: Annotated[tuple[Annotated[str, Field(max_length=120)], ...], Field(max_length=64)]
    """Threads of the processor and streams of the device."""
    events: Annotated[tuple[tuple[int, int, _Microseconds, _Microseconds], ...], Field(max_length=4000)]
    """Index of the name, index of the track, start and length in microseconds, by start."""
    left_out: Annotated[int, Field(ge=0, lt=2**62)]
    """Shorter events that did not fit."""
    memory: Annotated[tuple[tuple[_Microseconds, _Bytes], ...], Field(max_length=401)]
    """Microseconds since the start, and bytes in tensors above those at the start: of the device, or of the processor
    where no device was used."""

    @model_validator(mode="after")
    def _check_places(self) -> Self:
        for name, track, start, us in self.events:
            if not (0 <= name < len(self.names) and 0 <= track < len(self.tracks) and start >= 0 and us >= 0):
                raise ValueError(
                    f"event {(name, track, start, us)} of {len(self.names)} names, {len(self.tracks)} tracks"
                )
        return self


_Size: TypeAlias = Annotated[int, Strict(), Field(ge=0, lt=2**31)]
_Sizes: TypeAlias = tuple[_Size, _Size, _Size]
_Amount: TypeAlias = Annotated[int, Strict(), Field(gt=0, lt=2**62)]


class KernelFacts(BaseModel):
    """What torch's profiler knows of the calls of one kernel in one step; None is unknown.

    A kernel that is launched in several ways has the registers, memory, block and grid of the one with the most time.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    registers: OmitNone[_Size] = None
    """Per thread."""
    shared_bytes: OmitNone[_Size] = None
    """Shared memory of a block, static and dynamic."""
    block: OmitNone[_Sizes] = None
    """Threads."""
    grid: OmitNone[_Sizes] = None
    """Blocks."""
    launches: OmitNone[_Size] = None
    """Different ways in which it is launched, by the four above."""
    occupancy: OmitNone[Annotated[float, Strict(), Field(ge=0, le=1)]] = None
    """Share of the threads of the GPU's multiprocessors that can have a thread of it at once, by its launch; the mean
    over its time. Nobody counted the threads."""
    product_flops: OmitNone[_Amount] = None
    """FLOPs of the products of 16-bit matrices of which it is the longest kernel."""
    product_bytes: OmitNone[_Amount] = None
    """Bytes of these matrices and results, each counted once a product."""
    product_us: OmitNone[Annotated[float, Strict(), Field(gt=0, le=1e12)]] = None
    """Time of these products with all of their kernels."""

    @property
    def threads(self) -> int | None:
        """Threads of a block."""
        return None if self.block is None else math.prod(self.block)

    @property
    def flops_per_s(self) -> float | None:
        """Speed of the products, None without any."""
        return self.product_flops / self.product_us * 1e6 if self.product_flops and self.product_us else None

    @property
    def bytes_per_s(self) -> float | None:
        """Least speed at which the products took their matrices and wrote their results, None without any."""
        return self.product_bytes / self.product_us * 1e6 if self.product_bytes and self.product_us else None


class ProfiledStep(NamedTuple):
    """One step under torch's profiler."""

    step_kernels: tuple[tuple[str, int, float], ...]
    """Name, calls and microseconds of each."""
    kernel_facts: Mapping[str, KernelFacts]
    step_trace: StepTrace | None
    """None unless it was asked for."""


class Measurements(BaseModel):
    """Measurements that a receipt stores as fields of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    facts: Mapping[str, Fact]
    """Facts that the code recorded about itself in step 0 (ablate.kernels.facts)."""
    warmup_passes: tuple[float, ...]
    """Seconds of each forward and backward pass without an update that the warm-up ran besides its steps."""
    compile_s: Annotated[
        float,
        Metric("compile_s", "compile time", "s", source="both", decides="paired", cold=True, alike="token"),
    ]
    """Seconds of the pass before step 0 that compiles graphs and kernels, including its one execution. 0 without such a
    pass, as on XLA, where step 0 contains the compilation."""
    compile_cache_hit: bool | None
    """Whether all generated code came from the compilers' caches; None when nothing was compiled, or unknown."""
    kernels: Annotated[
        tuple[Mapping[str, Any], ...],
        Metric("kernel_count", "generated kernels that ran", "kernels", counted=True, alike="token"),
        Metric(
            "kernel_instructions",
            "machine instructions of the generated kernels",
            "instructions",
            summed="instructions",
            alike="token",
        ),
        Metric(
            "kernel_stack_bytes",
            "stack of the generated kernels",
            "bytes per thread",
            summed="stack_bytes",
            alike="token",
        ),
    ] = ()
    """One row per generated kernel that ran in step 0: name, registers, shared memory, instructions."""
    step_kernels: OmitNone[tuple[tuple[str, int, float], ...]] = None
    """Name, calls and microseconds of each kernel of the device in one more step after all measurements, or of each
    operator where the processor computes; None without a profiled step, and for commands, which report their own."""
    kernel_facts: Annotated[Mapping[str, KernelFacts], Field(exclude_if=lambda facts: not facts)] = Field(
        default_factory=dict
    )
    """Launches and matrix products of the kernels of the profiled step, by name, where torch's profiler knows them."""
    step_trace: OmitNone[StepTrace] = None
    """The profiled step over time, of a trial in the first block; None for other trials and without a profiled step."""
    validations: OmitNone[tuple[Validation, ...]] = None
    """The validations of a schedule, the last one after the last step; None without `steps.val_every`."""
    parameters: int
    """Trainable parameters."""
    flops_per_step: int
    """Model FLOPs of one step, forward and backward, counted from the configuration with whole rows."""
    document_flops_per_step: OmitNone[float] = None
    """The same with causal attention within documents: the mean over the batches of the window. None for commands and
    packages, and where nothing was executed."""
    communication_s: Annotated[
        float | None,
        Metric("communication_s", "exchanges between devices per step", "s", decides=None),
        Field(exclude_if=lambda value: value is None),
    ] = None
    """Seconds of one profiled step in which the rank with most of them exchanged tensors with others; None for a step
    of one process."""
    exposed_communication_s: Annotated[
        float | None,
        Metric("exposed_communication_s", "exchanges per step while nothing else runs", "s", decides=None),
        Field(exclude_if=lambda value: value is None),
    ] = None
    """Most seconds of these on one rank in which it did nothing else."""
    communication_bytes: Annotated[
        int | None,
        Metric("communication_gib", "tensors given to other devices per step", "GiB", per=GIB, decides=None),
        Field(exclude_if=lambda value: value is None),
    ] = None
    """Bytes of the tensors that one rank gave to exchanges in this step, the most of any rank."""
    training_began_s: OmitNone[float] = None
    """Start of training by a clock that is never set and that all processes of the machine share; None where
    nothing was executed."""
    waited_s: OmitNone[float] = None
    """Seconds this trial waited while the others of its block ran their slices; None where it ran in one go."""
    training_s: float
    """Wall seconds of the trial's own work, without waiting: build, steps, validation, memory reading."""
    process_s: Annotated[
        float | None,
        Metric("process_s", "time of the whole process", "s", source="program", decides="paired", alike="nothing"),
        Field(exclude_if=lambda value: value is None),
    ] = None
    """Wall seconds of a command's process from its start to its end; None for the built-in model."""
    cpu_s: Annotated[
        float | None,
        Metric("cpu_s", "processor time of all processes", "s", source="program", decides="paired", alike="nothing"),
        Field(exclude_if=lambda value: value is None),
    ] = None
    """Processor seconds of a command's processes on all cores, of the user and the system; None where process_s is."""
    cpu_step_s: Annotated[
        float | None,
        Metric("cpu_step_s", "processor time of a step", "s", source="program", decides="paired", named_in_key=True),
        Field(exclude_if=lambda value: value is None),
    ] = None
    """The same between the begin and the end of a command's window, over its steps; None without a window."""
    peak_driver_bytes: Annotated[
        int | None,
        Metric(
            "peak_driver_gib",
            "peak memory by the driver, sampled",
            "GiB",
            per=GIB,
            source="program",
            decides=None,
        ),
        Field(exclude_if=lambda value: value is None),
    ] = None
    """Most memory that a command's processes had on one GPU at any sample, contexts and libraries included. A peak
    between two samples is missed."""


class TrialMeasurements(Measurements, _MeasurementsInParts):
    """All measurements of a trial."""


NOTHING_MEASURED: Mapping[str, Any] = {
    "facts": {},
    "warmup_passes": (),
    "compile_s": 0.0,
    "compile_cache_hit": None,
    "parameters": 0,
    "flops_per_step": 0,
    "training_s": 0.0,
}
"""Values of the required measurements of a trial that ended before it measured them."""


def metrics_of(model: type[BaseModel]) -> list[Metric]:
    """Return the metrics that the annotations of `model` declare, in the order of its fields."""
    return [
        note if note.field else replace(note, field=name)
        for name, field in model.model_fields.items()
        for note in field.metadata
        if isinstance(note, Metric)
    ]
