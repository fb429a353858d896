"""The metrics of a receipt by name."""

from model.measurements import GIB, Metric, TrialMeasurements, metrics_of

_SUMMARY = (
    Metric(
        name="tokens_per_s",
        label="throughput",
        unit="tokens/s",
        better="higher",
        kind="ratio",
        field="summary.tokens_per_s",
        decides="paired",
        alike="token",
    ),
    Metric(
        name="step_s",
        label="step time",
        unit="s",
        better="lower",
        kind="ratio",
        field="summary.step_s_mean",
        decides="paired",
    ),
    Metric(
        name="model_tflops_per_s",
        label="model TFLOP/s",
        unit="TFLOP/s",
        better="higher",
        kind="ratio",
        field="summary.model_tflops_per_s",
        decides="paired",
        alike="nothing",
    ),
    Metric(
        name="loss_step1",
        label="loss of step 1",
        unit="nats",
        better=None,
        kind="loss",
        field="summary.loss_step1",
        decides="exact",
        alike="nothing",
    ),
    Metric(
        name="loss_final",
        label="final training loss",
        unit="nats",
        better=None,
        kind="loss",
        field="summary.loss_final",
        decides="exact",
        alike="nothing",
    ),
)
"""Metrics that the declared estimator derives from the steps."""

_COMPILATION = (
    Metric(
        name="hbm_peak_gib",
        label="peak HBM that the compiler planned",
        unit="GiB",
        better="lower",
        kind="absolute",
        field="compilation.hbm.peak_bytes",
        per=GIB,
        source="compilation",
        decides="exact",
    ),
    Metric(
        name="hbm_temp_gib",
        label="HBM for temporaries that the compiler planned",
        unit="GiB",
        better="lower",
        kind="absolute",
        field="compilation.hbm.temp_bytes",
        per=GIB,
        source="compilation",
        decides="exact",
    ),
    Metric(
        name="matmul_flops",
        label="FLOPs of the lowered matrix products outside of kernels",
        unit="FLOP",
        better="lower",
        kind="absolute",
        field="compilation.matmul_flops",
        source="compilation",
        decides="exact",
    ),
    Metric(
        name="custom_calls",
        label="kernels that the lowered step calls",
        unit="calls",
        better=None,
        kind="absolute",
        field="compilation.custom_calls",
        source="compilation",
        alike="token",
    ),
    Metric(
        name="graph_instructions",
        label="instructions of the lowered step",
        unit="instructions",
        better="lower",
        kind="absolute",
        field="compilation.instructions",
        source="compilation",
        decides="exact",
        alike="token",
    ),
)
"""Metrics that the compiler reports on node classes that execute nothing."""

_KINDS = ("ratio", "absolute", "loss")

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in sorted(
        [*_SUMMARY, *metrics_of(TrialMeasurements), *_COMPILATION],
        key=lambda metric: (_KINDS.index(metric.kind), metric.counted or metric.summed is not None),
    )
}
"""All metrics by name: ratios, then single numbers, numbers of tables, losses."""

PAIRED_METRICS: tuple[str, ...] = tuple(name for name, metric in METRICS.items() if metric.decides == "paired")
"""Metrics that can decide by statistics over blocks."""

WINDOW_METRICS: tuple[str, ...] = tuple(name for name in PAIRED_METRICS if METRICS[name].kind == "ratio")
"""Paired metrics of the measured window; all follow from its throughput."""

EXACT_METRICS: tuple[str, ...] = tuple(name for name, metric in METRICS.items() if metric.decides == "exact")
"""Metrics that can decide by value: they have no noise, so they need no test and no calibration."""

METRIC_LABELS: dict[str, str] = {name: metric.label for name, metric in METRICS.items()}
"""Names in reports by names in specs."""

PRIMARY_METRICS: tuple[str, ...] = PAIRED_METRICS + EXACT_METRICS
"""Metrics that can decide."""

REQUIRED_METRICS: tuple[str, ...] = tuple(name for name, metric in METRICS.items() if metric.kind != "ratio")
"""Metrics that a requirement can bound."""

LOSS_METRICS: tuple[str, ...] = tuple(name for name, metric in METRICS.items() if metric.kind == "loss")
"""Metrics that a requirement can compare with the baseline's."""

PEAK_METRICS: tuple[str, ...] = ("peak_reserved_gib", "peak_allocated_gib", "hbm_peak_gib")
"""Peaks of memory: only a change at the moment of the peak moves them."""
