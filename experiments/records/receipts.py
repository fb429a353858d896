"""The receipt: the immutable, digested JSON record of one trial. Raw samples are kept and marked, never dropped."""

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Annotated, Any

from pydantic import Field, ValidationError

from experiments import documents
from experiments.design.gate import Gate, show
from experiments.design.gates import GATES
from experiments.documents import Frozen, first_problem
from experiments.errors import ReceiptError
from experiments.outcomes import ArmRole, FailureClass, Outcome
from experiments.records.compilation_report import CompilationReport
from model.config import BLOCK_KINDS
from model.measurements import Measurements, Metric, OmitNone, Step

SCHEMA_VERSION = 2
"""2: untrimmed window, clock of every step, warm-up passes, peak of the device, load of other processes."""


class DeviceEvents(Frozen):
    """What happened to a trial's device from just before it to just after it, as the driver told."""

    sw_power_cap: OmitNone[Annotated[float, Field(ge=0)]] = None
    """Seconds that the driver slowed the device down to stay within its power limit; normal under full load."""
    sw_thermal_slowdown: OmitNone[Annotated[float, Field(ge=0)]] = None
    """Seconds that the driver slowed it down because it was hot."""
    hw_thermal_slowdown: OmitNone[Annotated[float, Field(ge=0)]] = None
    """Seconds that the hardware slowed itself down because it was hot."""
    hw_power_brake: OmitNone[Annotated[float, Field(ge=0)]] = None
    """Seconds that the machine's power supply asked the hardware to slow down."""
    ecc_uncorrected: OmitNone[Annotated[int, Field(ge=0)]] = None
    """New uncorrected memory errors."""
    foreign_processes: OmitNone[tuple[int, ...]] = None
    """Processes on any device of the machine that were there before or after the trial: its own are not."""


class ForeignProcess(Frozen):
    """A process that is no part of the trial and used a processor meanwhile."""

    pid: int
    name: str
    cpu_s: float
    """Processor time during the whole trial, in seconds."""


class Digests(Frozen):
    """What this receipt is chained to."""

    spec: str
    rule: str
    arm: str
    code: str
    """Of the source files of model, kernels and workers that ran."""
    data: str
    """Of tokenizer, packed rows and split."""


class Ids(Frozen):
    """Where the trial belongs."""

    ablation: str
    block: str
    block_index: int
    """Index of the block in the plan, from 0."""
    position: int
    """Place of this arm in the block's order, from 0."""
    trial: str
    attempt: str
    node: str
    device: str


class Environment(Frozen):
    """What the trial ran on."""

    node_name: str
    node_class: str
    device_name: str
    device_serial: str | None
    git_commit: str | None
    git_dirty_digest: str | None
    """Digest of the uncommitted patch; None when the tree is clean or there is no repository."""
    versions: Mapping[str, str]
    """python, torch, driver, cuda, tilelang, torch_xla ... as far as present."""
    cpu_threads: int
    peak_flops: float | None
    """The device's peak in FLOP/s for the config's dtype, of which mfu is a share; None where none is stated."""
    load_average_before: float | None
    """One-minute load average just before the trial."""
    foreign_load: float | None = None
    """Share of the cores' time, from the warm-up to the end of the window, that went to anything but the trial; None
    where the system does not tell."""
    stolen_load: OmitNone[float] = None
    """What of it a hypervisor gave to other machines while a core of this one was ready to run."""
    foreign_busiest: tuple[ForeignProcess, ...] = ()
    """The processes of others that used most, at most three."""
    throttle: DeviceEvents | None = None
    """What happened to the device meanwhile; None where its driver could not be asked, as on CPU nodes."""


class GateReading(Frozen):
    """Requested against observed, for one gate."""

    requested: Any
    observed: Any
    """None when this lane cannot observe it."""
    live: bool
    how: str
    """What was looked at, for example "fact loss.implementation"."""


class Memory(Frozen):
    """Peaks in bytes: in tensors (allocated), and held for them (reserved).

    Where a step was compiled and not run, both are what the compiler planned for one chip.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    """Device pool on an accelerator, peak resident set on a CPU node."""
    limit_bytes: int | None


class Summary(Frozen):
    """Numbers derived from the raw steps by the declared estimator; recomputed when a receipt is verified."""

    timed_steps: int
    step_s_mean: float
    """Seconds of the whole window over its steps: nothing is left out."""
    step_s_median: float
    tokens_per_s: float
    """Tokens of the whole window over its seconds."""
    tokens_per_s_median: float
    """Tokens of a step over the median of the steps' seconds: the throughput if nothing had stalled."""
    model_tflops_per_s: float
    """From `step_s_mean`."""
    mfu: float | None
    outlier_steps: int
    """Timed steps beyond median + 5 * max(1.4826 * MAD, 0.2 % of the median); they are counted, not dropped."""
    loss_step1: float
    """Loss of the first step (index 0), the one before any update."""
    loss_final: float
    """Mean loss of the last quarter of the timed steps, at least one."""
    loss_val: float | None


class _FieldOrder(Frozen):
    """All fields in the order that the JSON of receipts has always had; `Any` marks those of `Measurements`.

    A new measurement needs no line here. It comes last in the JSON.
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
    config: Mapping[str, Any]
    """The whole TrainConfig that ran."""
    environment: Environment
    gates: Mapping[str, GateReading]
    facts: Any
    steps: tuple[Step, ...]
    warmup_passes: Any
    summary: Summary | None
    """None when the trial did not reach its window, or compiled and ran nothing."""
    compilation: OmitNone[CompilationReport] = None
    """Output of the compiler; only on node classes that compile and execute nothing."""
    memory: Memory | None
    compile_s: Any
    compile_cache_hit: Any
    kernels: Any
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
"""Share of the median below which a spread is not believed."""


def summarise(
    steps: Sequence[Step], *, flops_per_step: int, loss_val: float | None, peak_flops: float | None
) -> Summary:
    """Derive the summary from raw steps: the untrimmed total of the timed window, the median beside it.

    `peak_flops` is the device's peak per second for MFU. Raises ReceiptError without a first or a timed step, or
    when a sample is not finite or not positive.
    """
    timed = [step for step in steps if step.phase == "timed"]
    first = next((step for step in steps if step.index == 0), None)
    if not timed or first is None:
        raise ReceiptError(f"no summary without step 0 and a timed step; given: {len(steps)} steps, {len(timed)} timed")
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
        model_tflops_per_s=rate / 1e12,
        mfu=None if peak_flops is None else rate / peak_flops,
        outlier_steps=_count_outliers([step.seconds for step in timed]),
        loss_step1=first.loss,
        loss_final=math.fsum(step.loss for step in last) / len(last),
        loss_val=loss_val,
    )


def _check_samples(steps: Sequence[Step]) -> None:
    for step in steps:
        if not (math.isfinite(step.loss) and math.isfinite(step.grad_norm)):
            raise ReceiptError(f"step {step.index} has loss {step.loss} and gradient norm {step.grad_norm}")
        if not (math.isfinite(step.seconds) and step.seconds > 0 and step.tokens > 0):
            raise ReceiptError(f"step {step.index} has {step.seconds} s for {step.tokens} tokens; both must be above 0")


def _count_outliers(seconds: Sequence[float]) -> int:
    """Count steps beyond median + 5 * max(1.4826 * MAD, 0.2 % of the median)."""
    middle = statistics.median(seconds)
    spread = statistics.median(abs(value - middle) for value in seconds)
    cutoff = middle + OUTLIER_MADS * max(MAD_TO_SIGMA * spread, MIN_SPREAD * middle)
    return sum(value > cutoff for value in seconds)


def read_metric(metric: Metric, receipt: Receipt) -> float | None:
    """Return `metric` in its unit; None where the receipt holds no value: no window, no memory, no generated kernel."""
    found: Any = reduce(_attribute, metric.field.split("."), receipt)  # type: ignore[arg-type]
    if metric.counted:
        return len(found) or None
    value: float | None = found if metric.summed is None else _sum(found, metric.summed)
    return value if value is None or metric.per == 1 else value / metric.per


def _sum(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Return the sum of `key` over `rows`; None where there are none, or one of them lacks it."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return sum(values) if values and len(values) == len(rows) else None


def _attribute(part: object, name: str) -> object:
    return None if part is None else getattr(part, name)


def read_gates(
    requested: Mapping[str, Any], facts: Mapping[str, Any], *, pattern: str = "".join(BLOCK_KINDS)
) -> dict[str, GateReading]:
    """Compare every requested gate with what the code recorded about itself in a model of this `pattern`.

    A gate at its default that nothing was recorded about is taken as live, and so is one of a kind of block that the
    model does not have; any other that was asked for and cannot be observed is not.
    """
    return {name: _read_gate(GATES[name], value, requested, facts, pattern) for name, value in requested.items()}


def _read_gate(
    gate: Gate, value: Any, requested: Mapping[str, Any], facts: Mapping[str, Any], pattern: str
) -> GateReading:
    if setting := gate.unused_because(requested):
        return GateReading(requested=value, observed=None, live=True, how=f"not used with {setting}")
    observed = gate.attest(facts)
    if observed is not None:
        wanted = value if gate.shown_as is None else gate.shown_as(requested, facts)
        live = type(observed) is type(wanted) and observed == wanted
        return GateReading(requested=value, observed=observed, live=live, how=gate.attested_by)
    if value == gate.default:
        return GateReading(requested=value, observed=None, live=True, how="default, not observable")
    if gate.block is not None and gate.block not in pattern:
        how = f"not used without a block of kind {gate.block}"
        return GateReading(requested=value, observed=None, live=True, how=how)
    how = f"{gate.attested_by}: nothing recorded, so {show(value)} is not proved"
    return GateReading(requested=value, observed=None, live=False, how=how)


def seal(fields: Mapping[str, Any]) -> Receipt:
    """Return the receipt of `fields` with its digest. Raises ReceiptError when a part is missing or not finite."""
    try:
        return documents.seal(Receipt.model_validate({**fields, "digest": ""}))
    except ValidationError as error:
        raise ReceiptError(f"not a receipt: {first_problem(error)}") from error
    except ValueError as error:
        raise ReceiptError(f"a receipt holds finite numbers only: {error}") from error
