"""The metrics of a receipt: unit, direction, how they are compared, and where the receipt holds them."""

from dataclasses import dataclass
from typing import Literal

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One number of a receipt."""

    label: str
    """Its name in reports."""
    unit: str
    better: Literal["higher", "lower"] | None
    """Direction of improvement; None where none is claimed (a lower loss after few steps is not a benefit)."""
    kind: Literal["ratio", "absolute", "loss"]
    """`ratio`: compared by ln(variant / baseline); `absolute`: by its difference; `loss`: by identity or envelope."""
    field: str
    """Where the receipt holds it, as a dotted path; `experiments.records.receipts.read_metric` follows it."""
    per: float = 1.0
    """What the receipt's number is divided by to give `unit`."""
    source: Literal["training", "compilation", "both"] = "training"
    """Which trials have it: those that train, those of a node class that compiles and executes nothing, or both."""
    summed: str | None = None
    """Where `field` is a table: the key whose values are added up over its rows."""
    counted: bool = False
    """Where `field` is a table: whether its rows are counted."""
    alike: Literal["step", "token", "nothing"] = "step"
    """What must be alike in two arms before their values are compared: the work of a whole step, that of a token, or
    nothing, because the work is in the unit or the values are only held to be identical."""
    resident_on: tuple[str, ...] = ()
    """Torch's device types that have no number of it where trials run on the host: there it is the resident set of the
    process, which also holds libraries and freed pages and is another one in every run. It cannot decide there."""
    cold: bool = False
    """Whether trials start with empty caches of compilers on disk where it decides."""
    decides: Literal["paired", "exact"] | None = None
    """How it decides as primary metric. `paired`: by a t test over block differences. `exact`: by its value, which must
    be the same, bit for bit, whenever one arm runs again with one seed. None: it cannot."""


METRICS: dict[str, Metric] = {
    "tokens_per_s": Metric(
        label="throughput",
        unit="tokens/s",
        better="higher",
        kind="ratio",
        field="summary.tokens_per_s",
        decides="paired",
        alike="token",
    ),
    "step_s": Metric(
        label="step time", unit="s", better="lower", kind="ratio", field="summary.step_s_mean", decides="paired"
    ),
    "model_tflops_per_s": Metric(
        label="model TFLOP/s",
        unit="TFLOP/s",
        better="higher",
        kind="ratio",
        field="summary.model_tflops_per_s",
        decides="paired",
        alike="nothing",
    ),
    "peak_reserved_gib": Metric(
        label="peak reserved memory",
        unit="GiB",
        better="lower",
        kind="absolute",
        field="memory.peak_reserved_bytes",
        per=GIB,
        resident_on=("cpu", "xla"),
        decides="exact",
    ),
    "peak_allocated_gib": Metric(
        label="peak allocated memory",
        unit="GiB",
        better="lower",
        kind="absolute",
        field="memory.peak_allocated_bytes",
        per=GIB,
        resident_on=("xla",),
        decides="exact",
    ),
    "compile_s": Metric(
        label="compile time",
        unit="s",
        better="lower",
        kind="absolute",
        field="compile_s",
        source="both",
        decides="paired",
        cold=True,
        alike="token",
    ),
    "hbm_peak_gib": Metric(
        label="peak HBM that the compiler planned",
        unit="GiB",
        better="lower",
        kind="absolute",
        field="compilation.hbm.peak_bytes",
        per=GIB,
        source="compilation",
        decides="exact",
    ),
    "hbm_temp_gib": Metric(
        label="HBM for temporaries that the compiler planned",
        unit="GiB",
        better="lower",
        kind="absolute",
        field="compilation.hbm.temp_bytes",
        per=GIB,
        source="compilation",
        decides="exact",
    ),
    "matmul_flops": Metric(
        label="FLOPs of the lowered matrix products outside of kernels",
        unit="FLOP",
        better="lower",
        kind="absolute",
        field="compilation.matmul_flops",
        source="compilation",
        decides="exact",
    ),
    "custom_calls": Metric(
        label="kernels that the lowered step calls",
        unit="calls",
        better=None,
        kind="absolute",
        field="compilation.custom_calls",
        source="compilation",
        alike="token",
    ),
    "graph_instructions": Metric(
        label="instructions of the lowered step",
        unit="instructions",
        better="lower",
        kind="absolute",
        field="compilation.instructions",
        source="compilation",
        decides="exact",
        alike="token",
    ),
    "kernel_count": Metric(
        label="generated kernels that ran",
        unit="kernels",
        better="lower",
        kind="absolute",
        field="kernels",
        counted=True,
        decides="exact",
        alike="token",
    ),
    "kernel_instructions": Metric(
        label="machine instructions of the generated kernels",
        unit="instructions",
        better="lower",
        kind="absolute",
        field="kernels",
        summed="instructions",
        decides="exact",
        alike="token",
    ),
    "kernel_stack_bytes": Metric(
        label="stack of the generated kernels",
        unit="bytes per thread",
        better="lower",
        kind="absolute",
        field="kernels",
        summed="stack_bytes",
        decides="exact",
        alike="token",
    ),
    "loss_step1": Metric(
        label="loss of step 1",
        unit="nats",
        better=None,
        kind="loss",
        field="summary.loss_step1",
        decides="exact",
        alike="nothing",
    ),
    "loss_final": Metric(
        label="final training loss",
        unit="nats",
        better=None,
        kind="loss",
        field="summary.loss_final",
        decides="exact",
        alike="nothing",
    ),
    "loss_val": Metric(
        label="validation loss",
        unit="nats",
        better=None,
        kind="loss",
        field="summary.loss_val",
        decides="exact",
        alike="nothing",
    ),
}
"""Every metric by name."""

PAIRED_METRICS: tuple[str, ...] = tuple(name for name, metric in METRICS.items() if metric.decides == "paired")
"""Metrics that can decide by statistics over blocks."""

WINDOW_METRICS: tuple[str, ...] = tuple(name for name in PAIRED_METRICS if METRICS[name].kind == "ratio")
"""Those of the measured window: all follow from its throughput."""

EXACT_METRICS: tuple[str, ...] = tuple(name for name, metric in METRICS.items() if metric.decides == "exact")
"""Metrics that can decide by their value alone: no noise, hence no test and no calibration."""

METRIC_LABELS: dict[str, str] = {name: metric.label for name, metric in METRICS.items()}
"""Its name in reports by its name in specs."""

PRIMARY_METRICS: tuple[str, ...] = PAIRED_METRICS + EXACT_METRICS
"""Metrics that can decide."""

REQUIRED_METRICS: tuple[str, ...] = tuple(name for name, metric in METRICS.items() if metric.kind != "ratio")
"""Metrics that a rule can require to stay within a bound."""

LOSS_METRICS: tuple[str, ...] = tuple(name for name, metric in METRICS.items() if metric.kind == "loss")
"""Metrics that a rule can require to agree with the baseline's."""

PEAK_METRICS: tuple[str, ...] = ("peak_reserved_gib", "peak_allocated_gib", "hbm_peak_gib")
"""The largest of what a step holds at once: only a change at that moment moves it."""
