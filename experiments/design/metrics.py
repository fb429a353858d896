"""The metrics of a receipt by name: our own, and those that a spec with a command declares."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from ablate.model.measurements import GIB, Metric, TrialMeasurements, metrics_of


def _loss(name: str, label: str) -> Metric:
    return Metric(name, label, "nats", f"summary.{name}", kind="loss", alike="nothing", source="step")


def _of_curve(name: str, label: str, unit: str, *, clocked: bool, kind: Literal["loss", "ratio"] = "ratio") -> Metric:
    told: Mapping[str, Any] = {"kind": kind, "clocked": clocked, "alike": "nothing"}
    return Metric(name, label, unit, "summary.curve", decides="curve", **told)


_CURVES = (
    _of_curve("loss_val_at_time", "validation loss at equal training time", "nats", clocked=True, kind="loss"),
    _of_curve("tokens_to_loss", "token use to the target loss", "tokens", clocked=False),
    _of_curve("seconds_to_loss", "training time to the target loss", "s", clocked=True),
)
"""Metrics of the validation curves of a block's trials; no receipt has them alone."""

THROUGHPUT, PER_DEVICE = "tokens_per_s", "tokens_per_s_per_device"
"""Metrics of the same number where all arms have as many devices."""

_THROUGHPUT = Metric(
    THROUGHPUT,
    "throughput",
    "tokens/s",
    "summary.tokens_per_s",
    better="higher",
    kind="ratio",
    decides="paired",
    alike="token",
    source="step",
)
_SUMMARY = (
    _THROUGHPUT,
    replace(_THROUGHPUT, name=PER_DEVICE, label="throughput of a device", per_device=True),
    Metric("step_s", "step time", "s", "summary.step_s_mean", kind="ratio", decides="paired", source="step"),
    Metric(
        "model_tflops_per_s",
        "model TFLOP/s",
        "TFLOP/s",
        "summary.model_tflops_per_s",
        better="higher",
        kind="ratio",
        decides="paired",
        alike="nothing",
    ),
    _loss("loss_step1", "loss of step 1"),
    _loss("loss_final", "final training loss"),
)
"""Metrics that the declared estimator derives from the steps."""


def _compiled(name: str, label: str, unit: str, field: str, **changes: Any) -> Metric:
    return Metric(name, label, unit, f"compilation.{field}", source="compilation", **changes)


_COMPILATION = (
    _compiled("hbm_peak_gib", "peak HBM that the compiler planned", "GiB", "hbm.peak_bytes", per=GIB),
    _compiled("hbm_temp_gib", "HBM for temporaries that the compiler planned", "GiB", "hbm.temp_bytes", per=GIB),
    _compiled("matmul_flops", "FLOPs of the lowered matrix products outside of kernels", "FLOP", "matmul_flops"),
    _compiled(
        "custom_calls",
        "kernels that the lowered step calls",
        "calls",
        "custom_calls",
        better=None,
        decides=None,
        alike="token",
    ),
    _compiled("graph_instructions", "instructions of the lowered step", "instructions", "instructions", alike="token"),
)
"""Metrics that the compiler reports on node classes that execute nothing."""

_KINDS = ("ratio", "absolute", "loss")

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in sorted(
        [*_SUMMARY, *metrics_of(TrialMeasurements), *_COMPILATION, *_CURVES],
        key=lambda metric: (_KINDS.index(metric.kind), metric.counted or metric.summed is not None),
    )
}
"""All metrics by name: ratios, then single numbers, numbers of tables, losses."""

PAIRED_METRICS: tuple[str, ...] = tuple(name for name, metric in METRICS.items() if metric.decides == "paired")
"""Metrics that can decide by statistics over blocks."""

PROCESS_TIME = "process_s"
CPU_STEP = "cpu_step_s"
"""Processor time of the marked steps of a command."""

OTHER_PROGRAM: dict[str, Any] = {
    "other_work": "no word where the steps of two arms have different tokens, as the program reports them",
}
"""Addition to the comparison of a rule where the arms are commands or recipes of packages."""

PROCESS_METRICS: tuple[str, ...] = tuple(
    name for name in PAIRED_METRICS if METRICS[name].source == "program" and name != CPU_STEP
)
"""Those of the whole process of a command, which may mark no steps."""

WINDOW_METRICS: tuple[str, ...] = tuple(name for name in PAIRED_METRICS if METRICS[name].kind == "ratio")
"""Paired metrics of the measured window; all follow from its throughput."""

EXACT_METRICS: tuple[str, ...] = tuple(name for name, metric in METRICS.items() if metric.decides == "exact")
"""Metrics that can decide by value: they have no noise, so they need no test and no calibration."""

METRIC_LABELS: dict[str, str] = {name: metric.label for name, metric in METRICS.items()}
"""Names in reports by names in specs."""

CURVE_METRICS: tuple[str, ...] = tuple(name for name, metric in METRICS.items() if metric.decides == "curve")
"""Metrics that decide by statistics over seeds, from the validation curves of a block."""

TARGET_METRICS: tuple[str, ...] = tuple(name for name in CURVE_METRICS if METRICS[name].kind == "ratio")
"""Those that need a target loss."""

PRIMARY_METRICS: tuple[str, ...] = PAIRED_METRICS + EXACT_METRICS + CURVE_METRICS
"""Metrics that can decide."""

LOSS_METRICS: tuple[str, ...] = tuple(name for name in EXACT_METRICS if METRICS[name].kind == "loss")
"""Metrics that decide by identity without a margin, and by statistics over seeds with one."""

BUDGETED_METRICS: tuple[str, ...] = tuple(
    name for name, metric in METRICS.items() if metric.kind != "ratio" and name not in CURVE_METRICS
)
"""Metrics that a requirement can bound in every block."""

PROVED_METRICS: tuple[str, ...] = WINDOW_METRICS + LOSS_METRICS + CURVE_METRICS
"""Metrics of ours that a requirement can prove to be no worse than the baseline's."""

SEED_METRICS: tuple[str, ...] = LOSS_METRICS + CURVE_METRICS
"""Metrics of ours whose sample is the seed."""

TIMED_METRICS: tuple[str, ...] = WINDOW_METRICS + tuple(name for name in CURVE_METRICS if METRICS[name].clocked)
"""Metrics of ours that a requirement can prove on a calibrated device only."""

REQUIRED_METRICS: tuple[str, ...] = tuple(n for n in METRICS if n in BUDGETED_METRICS or n in PROVED_METRICS)
"""Metrics that a requirement can name."""

DECLARED_UNIT = "as reported"
"""Unit of a declared metric."""


def declared_metric(name: str, better: Literal["higher", "lower"]) -> Metric:
    """Return the metric of a number that a program reports at its end."""
    field = f"program.reported.{name}"
    return Metric(name, name, DECLARED_UNIT, field, better=better, kind="ratio", source="program", decides="paired")


def find_metric(name: str, declared: Mapping[str, Literal["higher", "lower"]]) -> Metric | None:
    """Return one of our metrics, or one that a program declares with this better direction; None for no metric."""
    if name in METRICS or name not in declared:
        return METRICS.get(name)
    return declared_metric(name, declared[name])


PEAK_METRICS: tuple[str, ...] = ("peak_reserved_gib", "peak_allocated_gib", "hbm_peak_gib")
"""Peaks of memory: only a change at the moment of the peak moves them."""


METRIC_NAME = re.compile("[a-z][a-z0-9_]{0,62}")
Tracker: TypeAlias = Literal["tensorboard", "wandb", "mlflow"]
TRACKER_VARIABLES: Mapping[Tracker, tuple[str, ...]] = {
    "tensorboard": (),
    "wandb": ("WANDB_MODE", "WANDB_DIR"),
    "mlflow": ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"),
}
"""Variables by which the worker lets a program log into the folder of its trial."""

NOT_OURS: dict[str, Any] = {"pattern": f"^{METRIC_NAME.pattern}$", "not": {"enum": [*METRICS]}}
"""JSON Schema of the name of a declared metric."""


def is_declarable(name: str) -> bool:
    """Return whether a spec may declare a metric of this name."""
    return name not in METRICS and METRIC_NAME.fullmatch(name) is not None


@dataclass(frozen=True, kw_only=True)
class LoggedMetric:
    """Where a program logs a metric."""

    tracker: Tracker
    tag: str
    """Its name there."""
    run: str | None = None
    """The run whose numbers count, of several."""

    def __str__(self) -> str:
        return f"{self.tracker}: {self.tag}" + (f" of run {self.run}" if self.run else "")
