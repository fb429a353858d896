"""The receipt: the immutable, digested JSON record of one trial. It keeps and marks all raw samples."""

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import accumulate
from typing import Annotated, Any

from pydantic import Field, ValidationError

from ablate.experiments import documents
from ablate.experiments.design.arms import TrialConfig
from ablate.experiments.design.kinds.gate_readings import GateReading
from ablate.experiments.design.metrics import find_metric
from ablate.experiments.documents import Frozen, first_problem
from ablate.experiments.errors import ReceiptError
from ablate.experiments.outcomes import ArmRole, FailureClass, Outcome
from ablate.experiments.records.compilation_report import CompilationReport
from ablate.experiments.records.program_report import KernelRows, ProgramReport
from ablate.model.measurements import Measurements, Metric, OmitNone, Step, Validation

SCHEMA_VERSION = 4
"""Versions 1 to 3 are of release 0.1 (`earlier_release`)."""


class Digests(Frozen):
    """Digests of the inputs of the trial."""

    spec: str
    rule: str
    arm: str
    code: str
    """Of the source files of model, kernels and workers that ran."""
    data: str
    """Of tokenizer, packed rows and split."""
    validation: OmitNone[str] = None
    """Of tokenizer and validation rows; None for commands."""


class Ids(Frozen):
    """Ids of the trial and of the objects that it belongs to."""

    ablation: str
    block: str
    block_index: int
    """Index of the block in the plan, from 0."""
    position: int
    """Place of the arm in the block's order, from 0."""
    trial: str
    attempt: str
    node: str
    device: str


class DeviceEvents(Frozen):
    """Events of a trial's device from just before to just after the trial, as the driver reports them."""

    sw_power_cap: OmitNone[Annotated[float, Field(ge=0)]] = None
    """Seconds that the driver slowed the device down to its power limit; normal under full load."""
    sw_thermal_slowdown: OmitNone[Annotated[float, Field(ge=0)]] = None
    """Seconds that the driver slowed the device down because it was hot."""
    hw_thermal_slowdown: OmitNone[Annotated[float, Field(ge=0)]] = None
    """Seconds that the hardware slowed itself down because it was hot."""
    hw_power_brake: OmitNone[Annotated[float, Field(ge=0)]] = None
    """Seconds that the power supply made the hardware slow down."""
    ecc_uncorrected: OmitNone[Annotated[int, Field(ge=0)]] = None
    """New uncorrected memory errors."""
    foreign_processes: OmitNone[tuple[int, ...]] = None
    """Processes of others on any device of the machine, before or after the trial."""


class HeldDevice(Frozen):
    """One of several devices of a trial."""

    name: str
    serial: OmitNone[str] = None
    events: OmitNone[DeviceEvents] = None
    """Of this device alone."""


class HeldNode(Frozen):
    """One of several nodes of a trial."""

    name: str
    """As the cluster calls it."""
    foreign_load: OmitNone[float] = None
    stolen_load: OmitNone[float] = None
    devices: tuple[HeldDevice, ...]


class ForeignProcess(Frozen):
    """A process outside the trial that used a processor meanwhile."""

    pid: int
    name: str
    cpu_s: float
    """Processor time during the whole trial, in seconds."""


class Environment(Frozen):
    """Machine and software of the trial."""

    node_name: str
    node_class: str
    device_name: str
    device_serial: str | None
    git_commit: str | None
    git_dirty_digest: str | None
    """Digest of the uncommitted patch; None when the tree is clean or without a repository."""
    versions: Mapping[str, str]
    """Of python, torch, driver, cuda, tilelang, torch_xla and others, where present."""
    cpu_threads: int
    peak_flops: Annotated[float, Field(gt=0)] | None
    """Peak of the device in FLOP/s for the config's dtype, the denominator of mfu; None where none is stated."""
    load_average_before: float | None
    """One-minute load average just before the trial."""
    foreign_load: float | None = None
    """Share of the cores' time that went to other processes, from the warm-up to the end of the window; None where the
    system does not report it."""
    stolen_load: OmitNone[float] = None
    """Part of `foreign_load` that a hypervisor gave to other machines while a core of this one was ready to run."""
    foreign_busiest: tuple[ForeignProcess, ...] = ()
    """Up to three other processes with the most processor time."""
    throttle: DeviceEvents | None = None
    """Events of the device meanwhile; None without a driver that reports them, as on CPU nodes. Of several devices the
    longest slow-down, all errors and all processes."""
    devices: OmitNone[tuple[HeldDevice, ...]] = None
    """All devices of a trial with several; `device_name` and `device_serial` are those of the first."""
    nodes: OmitNone[tuple[HeldNode, ...]] = None
    """All nodes of a trial over several. `devices` are those of the first one, `foreign_load` is the largest, and
    `throttle` counts the devices of all."""


def held_by(environment: Environment) -> tuple[tuple[str, str | None], ...]:
    """Return name and serial number of each device of a trial."""
    if environment.devices is None:
        return ((environment.device_name, environment.device_serial),)
    return tuple((device.name, device.serial) for device in environment.devices)


def identities(environment: Environment) -> tuple[str, ...]:
    """Return the identity of each device of a trial: its serial number, or the names of node and device."""
    return tuple(device_identity(serial, environment.node_name, name) for name, serial in held_by(environment))


def device_identity(serial: str | None, node_name: str, device_name: str) -> str:
    """Return the identity of a device."""
    return serial or f"{node_name}, {device_name}"


class Memory(Frozen):
    """Peaks in bytes: in tensors (allocated), and reserved for them.

    For a compiled step that did not run, both are the compiler's plan for one chip.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    """Device pool on an accelerator, peak resident set on a CPU node."""
    limit_bytes: int | None


class CurvePoint(Frozen):
    """One validation by a schedule."""

    step: int
    """Index of the step before it."""
    tokens: int
    """Tokens of all steps until then, step 0 and warm-up included."""
    seconds: float
    """Training seconds until then: the timed steps', and for each earlier step the mean of the timed ones. Its own time
    has compilation and cold caches in it; without it, the arm with the longer steps would get more training."""
    loss: float


class Summary(Frozen):
    """Numbers that the declared estimator derives from the raw steps; verification recomputes them."""

    timed_steps: int
    step_s_mean: float
    """Seconds of the whole window over its steps, without omissions."""
    step_s_median: float
    tokens_per_s: float
    """Tokens of the whole window over its seconds."""
    tokens_per_s_median: float
    """Tokens of a step over the median step time: the throughput without stalls."""
    model_tflops_per_s: float | None
    """From `step_s_mean`; None where nobody counts model FLOPs."""
    mfu: float | None
    """Share of `peak_flops` with the model FLOPs of whole rows, which packed rows can bring above 1."""
    document_mfu: OmitNone[float] = None
    """The same with attention within documents; None where nobody counted them."""
    outlier_steps: int
    """Timed steps above median + 5 * max(1.4826 * MAD, 0.2 % of the median); counted, not dropped."""
    loss_step1: float | None
    """Loss of step 0, before any update; None if the program reported none, as are the other losses."""
    loss_final: float | None
    """Mean loss of the last quarter of the timed steps, at least one."""
    loss_val: float | None
    curve: OmitNone[tuple[CurvePoint, ...]] = None
    """The validations of a schedule; the last one is `loss_val`."""

    @property
    def utilisation(self) -> float | None:
        """Share of the device's peak that useful FLOPs reach: attention to earlier tokens of the same document only.

        Of a program, with the FLOPs that it states. None without a known peak.
        """
        return self.mfu if self.document_mfu is None else self.document_mfu


class _FieldOrder(Frozen):
    """All fields in the order of the JSON; `Measurements` declares those of type `Any`.

    A new measurement needs no line here and comes last in the JSON.
    """

    schema_version: int = SCHEMA_VERSION
    ids: Ids
    arm: str
    role: ArmRole
    seed: int
    outcome: Outcome
    failure_class: FailureClass | None = None
    message: str | None = None
    digests: Digests
    config: TrialConfig
    """The whole configuration that ran."""
    environment: Environment
    gates: Mapping[str, GateReading]
    facts: Any
    steps: tuple[Step, ...]
    warmup_passes: Any
    summary: Summary | None
    """None when the trial did not finish its window, or executed nothing."""
    compilation: OmitNone[CompilationReport] = None
    """Output of the compiler; only on node classes that compile and execute nothing."""
    program: OmitNone[ProgramReport] = None
    """How a command was run, and its own reports; None for the built-in model."""
    memory: Memory | None
    compile_s: Any
    compile_cache_hit: Any
    kernels: Any
    validations: Any
    parameters: Any
    flops_per_step: Any
    started_at: str
    """RFC 3339 UTC."""
    training_began_s: Any
    waited_s: Any
    training_s: Any
    wall_s: float
    """Wall seconds from the worker's order to the end of the process, without waiting."""
    digest: str
    """Of everything else in the receipt."""


class Receipt(Measurements, _FieldOrder):
    """The record of one trial."""


OUTLIER_MADS = 5.0
MAD_TO_SIGMA = 1.4826
MIN_SPREAD = 0.002
"""Smallest spread of the outlier rule, as a share of the median."""


def summarise(
    steps: Sequence[Step],
    *,
    flops_per_step: int,
    loss_val: float | None,
    peak_flops: float | None,
    validations: Sequence[Validation] | None = None,
    document_flops_per_step: float | None = None,
) -> Summary:
    """Derive the summary from raw steps: the untrimmed total of the timed window and the median.

    `peak_flops` is the device's peak in FLOP/s. Raises ReceiptError without step 0 or a timed step, or when a sample is
    not finite, a duration not positive, or a sum too large for a number.
    """
    try:
        return _summarised(
            steps,
            flops_per_step=flops_per_step,
            loss_val=loss_val,
            peak_flops=peak_flops,
            validations=validations,
            document_flops_per_step=document_flops_per_step,
        )
    except OverflowError as error:
        raise ReceiptError(f"the samples give no finite summary: {error}") from error


def _summarised(
    steps: Sequence[Step],
    *,
    flops_per_step: int,
    loss_val: float | None,
    peak_flops: float | None,
    validations: Sequence[Validation] | None,
    document_flops_per_step: float | None,
) -> Summary:
    timed = [step for step in steps if step.phase == "timed"]
    first = next((step for step in steps if step.index == 0), None)
    if not timed or first is None:
        raise ReceiptError(f"a summary needs step 0 and a timed step; given: {len(steps)} steps, {len(timed)} timed")
    _check_samples(steps)
    seconds, tokens = math.fsum(step.seconds for step in timed), sum(step.tokens for step in timed)
    mean, median = seconds / len(timed), statistics.median(step.seconds for step in timed)
    rate = flops_per_step / mean
    last = timed[-max(1, len(timed) // 4) :]
    return Summary(
        timed_steps=len(timed),
        step_s_mean=mean,
        step_s_median=median,
        tokens_per_s=tokens / seconds,
        tokens_per_s_median=tokens / len(timed) / median,
        model_tflops_per_s=rate / 1e12 if flops_per_step else None,
        mfu=None if peak_flops is None else rate / peak_flops,
        document_mfu=None
        if peak_flops is None or document_flops_per_step is None
        else document_flops_per_step / mean / peak_flops,
        outlier_steps=_count_outliers([step.seconds for step in timed]),
        loss_step1=first.loss,
        loss_final=_mean_loss(last),
        loss_val=loss_val,
        curve=None if validations is None else _curve(steps, validations, mean),
    )


def _curve(steps: Sequence[Step], validations: Sequence[Validation], mean_s: float) -> tuple[CurvePoint, ...]:
    """Return the points of a curve in the order of the validations, each after an existing step."""
    tokens = [0, *accumulate(step.tokens for step in steps)]
    seconds = [0.0, *accumulate(step.seconds if step.phase == "timed" else mean_s for step in steps)]
    points = {step.index: (tokens[place], seconds[place]) for place, step in enumerate(steps, start=1)}
    try:
        return tuple(
            CurvePoint(step=one.step, tokens=points[one.step][0], seconds=points[one.step][1], loss=one.loss)
            for one in validations
        )
    except KeyError as error:
        raise ReceiptError(f"a validation follows step {error}, which does not exist") from error


def is_finite(step: Step) -> bool:
    """Return whether the numbers of `step` are finite; absent ones are."""
    return all(math.isfinite(value) for value in (step.loss, step.grad_norm) if value is not None)


def _mean_loss(steps: Sequence[Step]) -> float | None:
    losses = [step.loss for step in steps if step.loss is not None]
    if len(losses) < len(steps):
        return None
    try:
        return math.fsum(losses) / len(losses)
    except OverflowError:
        return math.fsum(loss / len(losses) for loss in losses)


def _check_samples(steps: Sequence[Step]) -> None:
    for step in steps:
        if not is_finite(step):
            raise ReceiptError(f"step {step.index} has loss {step.loss} and gradient norm {step.grad_norm}")
        if not (math.isfinite(step.seconds) and step.seconds > 0 and step.tokens >= 0):
            raise ReceiptError(f"step {step.index} has {step.seconds} s for {step.tokens} tokens; too little")


def _count_outliers(seconds: Sequence[float]) -> int:
    cutoff = outlier_cutoff(seconds)
    return sum(value > cutoff for value in seconds)


def outlier_cutoff(seconds: Sequence[float]) -> float:
    """Return the seconds above which a step is an outlier: median + 5 * max(1.4826 * MAD, 0.2 % of the median)."""
    middle = statistics.median(seconds)
    spread = statistics.median(abs(value - middle) for value in seconds)
    return middle + OUTLIER_MADS * max(MAD_TO_SIGMA * spread, MIN_SPREAD * middle)


def read_metric(metric: Metric, receipt: Receipt) -> float | None:
    """Return `metric` in its unit; None when the receipt has no value: no window, no memory, no generated kernel.

    A number of a curve has none, because it depends on the other trial or on the rule.
    """
    if metric.decides == "curve":
        return None
    field: Any = reduce(_attribute, metric.field.split("."), receipt)  # type: ignore[arg-type]
    if metric.counted:
        return len(field) or None
    value: float | None = field if metric.summed is None else _sum(field, metric.summed)
    if metric.per_device and value is not None:
        value /= receipt.config.devices
    return value if value is None or metric.per == 1 else value / metric.per


def _sum(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Return the sum of `key` over `rows`; None without rows, or when one lacks the key."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return sum(values) if values and len(values) == len(rows) else None


def _attribute(part: object, name: str) -> object:
    if isinstance(part, Mapping):
        return part.get(name)
    return None if part is None else getattr(part, name)


def kernel_rows(receipt: Receipt) -> KernelRows:
    """Return the kernels of the profiled step; none without one."""
    return receipt.step_kernels or (receipt.program.kernels if receipt.program else ())


def read_named(name: str, receipt: Receipt) -> float | None:
    """Return one of our metrics, or one that the receipt's configuration declares; None without a value."""
    metric = find_metric(name, receipt.config.declared)
    return None if metric is None else read_metric(metric, receipt)


def seal(fields: Mapping[str, Any]) -> Receipt:
    """Return the sealed receipt of `fields`. Raises ReceiptError when a part is missing or not finite."""
    try:
        return documents.seal(Receipt.model_validate({**fields, "digest": ""}))
    except ValidationError as error:
        raise ReceiptError(f"not a receipt: {first_problem(error)}") from error
    except ValueError as error:
        raise ReceiptError(f"a receipt holds finite numbers only: {error}") from error
