"""The runs of arms and trials under an ablation in MLflow, and its plots, as plain data."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ablate.experiments.analysis.curves import band_of
from ablate.experiments.analysis.programs import changes_of
from ablate.experiments.analysis.statistics import percent
from ablate.experiments.analysis.verdicts import ArmSummary, VariantVerdict, Verdict
from ablate.experiments.block_numbers import block_number, place_number
from ablate.experiments.design.arms import Arm
from ablate.experiments.design.metrics import METRICS
from ablate.experiments.outcomes import AblationState, Outcome, TrialState
from ablate.experiments.records.receipts import Receipt, read_named
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.changes import arm_changes, in_one_line
from ablate.experiments.reporting.kernel_tables import kernels_csv
from ablate.experiments.reporting.mlflow import content, views
from ablate.experiments.reporting.mlflow.content import RunContent
from ablate.experiments.reporting.mlflow.parent import OPEN, STATUS
from ablate.experiments.reporting.pictures import drawing, registry
from ablate.experiments.reporting.sentences import WITHOUT_STATISTICS, improvement_pct
from ablate.experiments.reporting.step_traces import TRACE_FILE, chrome_trace, traces
from ablate.experiments.reporting.verdict_layout import VariantLayout
from ablate.experiments.reporting.view import AblationView, TrialView
from ablate.model.measurements import GIB, Step

MOST_POINTS = 2500
"""Points per series that MLflow's own pages read. receipt.json has every step."""
LONGEST_REASON = 500
KERNELS_FILE = "kernels.csv"
"""Table of the kernels of a variant's profiled step against the baseline's."""
WITHOUT_RECEIPT: dict[str, str] = {TrialState.CANCELLED: "KILLED", TrialState.FAILED: "FAILED"}
"""Status of a trial that started and left no receipt."""


def trial_runs(view: AblationView) -> Iterator[content.RunContent]:
    """Yield a run per trial that has ended, with or without a receipt."""
    arms = view.plan.arm_by_name
    for trial in view.trials:
        if trial.receipt is not None:
            yield _measured(view, trial, trial.receipt, arms[trial.arm])
        elif trial.attempt_id is not None and trial.state in WITHOUT_RECEIPT:
            yield _lost(view, trial, arms[trial.arm])


def _measured(view: AblationView, trial: TrialView, receipt: Receipt, arm: Arm) -> content.RunContent:
    started = content.milliseconds(receipt.started_at)
    measured = receipt.outcome is Outcome.MEASURED
    tags = _tags(view, trial, arm) | content.source_tags([receipt])
    tags |= {
        "ablation.seed": str(receipt.seed),
        "ablation.outcome": receipt.outcome.value,
        "ablation.receipt_digest": receipt.digest,
        "ablation.code_digest": receipt.digests.code,
        "ablation.data_digest": receipt.digests.data,
        "ablation.node": receipt.environment.node_name,
        "ablation.device": receipt.environment.device_name,
        "ablation.failure_class": receipt.failure_class.value if receipt.failure_class else "",
        content.NOTE_TAG: wording.shorten(receipt.message or "", LONGEST_REASON),
    }
    place = f" s{receipt.seed} b{block_number(trial.block_index):02}"
    return content.finite(
        content.RunContent(
            identity=_identity(trial),
            name=content.run_name(trial.arm, place if measured else f"{place}: {receipt.outcome}"),
            status="FINISHED" if measured else "FAILED",
            started_ms=started,
            ended_ms=content.receipt_ended_ms(receipt),
            tags=tags,
            params=content.params(arm),
            points=(
                *_summary_points(receipt),
                *_step_points(receipt, started),
                *_curve_points(receipt, started),
                *_logged_points(receipt),
            ),
            texts={"receipt.json": receipt.model_dump_json()},
            datasets=content.datasets([receipt]),
        )
    )


def _lost(view: AblationView, trial: TrialView, arm: Arm) -> content.RunContent:
    created = content.milliseconds(view.created_at)
    return content.finite(
        content.RunContent(
            identity=_identity(trial),
            name=content.run_name(trial.arm, f" b{block_number(trial.block_index):02}: {trial.state}"),
            status=WITHOUT_RECEIPT[trial.state],
            started_ms=created,
            ended_ms=created,
            tags=_tags(view, trial, arm)
            | {"ablation.outcome": trial.state, content.NOTE_TAG: wording.shorten(trial.reason or "", LONGEST_REASON)},
            params=content.params(arm),
        )
    )


def _identity(trial: TrialView) -> str:
    return f"{trial.trial_id}/{trial.attempt_id}"


def _tags(view: AblationView, trial: TrialView, arm: Arm) -> dict[str, str]:
    return content.common_tags(view, content.RunKind.TRIAL, _identity(trial)) | {
        "ablation.trial": trial.trial_id,
        "ablation.attempt": trial.attempt_id or "",
        "ablation.arm": trial.arm,
        "ablation.role": arm.role,
        "ablation.block": str(block_number(trial.block_index)),
        "ablation.order": str(place_number(trial.position)),
        "ablation.arm_digest": arm.digest,
    }


def _summary_points(receipt: Receipt) -> list[content.Point]:
    values = {name: read_named(name, receipt) for name in METRICS}
    values |= {"training_s": receipt.training_s, "wall_s": receipt.wall_s}
    if receipt.summary is not None:
        values |= {"utilisation": receipt.summary.utilisation, "step_s_median": receipt.summary.step_s_median}
    for name, value in receipt.program.reported.items() if receipt.program else ():
        is_free = name in receipt.config.declared and name not in values
        values[name if is_free else content.reported_key(name)] = value
    ended = content.receipt_ended_ms(receipt)
    return [content.Point(name, value, ended, 0) for name, value in values.items() if value is not None]


def _step_points(receipt: Receipt, started_ms: int) -> list[content.Point]:
    points: list[content.Point] = []
    seconds = 0.0
    kept = {step.index for step in drawing.thin(receipt.steps, MOST_POINTS)}
    for step in receipt.steps:
        seconds += step.seconds if math.isfinite(step.seconds) else 0.0
        if step.index in kept:
            at_ms = started_ms + round(1000 * seconds)
            points += [
                content.Point(f"steps/{name}", value, at_ms, step.index) for name, value in _step_values(step).items()
            ]
    return points


def _curve_points(receipt: Receipt, started_ms: int) -> Iterator[content.Point]:
    """Yield the validations of a schedule; their step is the number of tokens."""
    points = receipt.summary.curve if receipt.summary else None
    for point in drawing.thin(points or (), MOST_POINTS):
        yield content.Point(CURVE, point.loss, started_ms + round(1000 * point.seconds), point.tokens)
        yield content.Point(f"{CURVE}_seconds", point.seconds, started_ms + round(1000 * point.seconds), point.tokens)


def _logged_points(receipt: Receipt) -> Iterator[content.Point]:
    """Yield the metrics that a program logged, at its own steps."""
    ended = content.receipt_ended_ms(receipt)
    for name, curve in receipt.program.curves.items() if receipt.program else ():
        for step, value in curve:
            yield content.Point(f"curve/{name}", value, ended, step)


def _band_points(view: AblationView, receipts: Sequence[Receipt]) -> Iterator[content.Point]:
    """Yield an arm's curve over its seeds, the mean and the quartiles; their step is the number of tokens."""
    at_ms = content.ended_ms(view)
    for point in drawing.thin(band_of(receipts), MOST_POINTS):
        for name, value in (("mean", point.mean), ("low", point.low), ("high", point.high), ("seconds", point.seconds)):
            yield content.Point(f"{CURVE}_{name}", value, at_ms, point.tokens)


def _step_values(step: Step) -> dict[str, float]:
    values = {"seconds": step.seconds}
    values |= {name: value for name in ("loss", "grad_norm") if (value := getattr(step, name)) is not None}
    if step.seconds > 0:
        values["tokens_per_s"] = step.tokens / step.seconds
    if step.clock_mhz is not None:
        values["clock_mhz"] = step.clock_mhz
    return values


CURVE = "curve/loss_val"
"""Metric with one value per validation of a schedule, in nats."""
DIFFERENCE = "difference_pct"
"""Metric with one value per block, in percent."""


def arm_runs(view: AblationView) -> Iterator[content.RunContent]:
    """Yield the runs of the variants and of the baseline; none without a verdict."""
    if view.verdict is None or view.answer is None:
        return
    variants = {variant.arm: variant for variant in view.verdict.variants}
    for place, layout in enumerate(view.answer.variants):
        yield _variant(view, variants[layout.arm], layout, metric=view.answer.rule.metric, place=place)
    yield _baseline(view, view.verdict, place=len(variants))


def _variant(
    view: AblationView, variant: VariantVerdict, layout: VariantLayout, *, metric: str, place: int
) -> content.RunContent:
    arm, broken = view.plan.arm_by_name[variant.arm], variant.verdict in WITHOUT_STATISTICS
    tags = {
        "ablation.verdict": variant.verdict.value,
        "ablation.decision": variant.decision.value,
        "ablation.cause": "" if variant.cause is None else variant.cause.value,
        "ablation.gates": in_one_line(arm_changes(arm, view.plan.baseline)),
        "ablation.metric": metric,
        content.NOTE_TAG: _note(layout),
    }
    points = (*_numbers(view, layout.numbers | _improvement(variant)), *_differences(view, variant.arm))
    name = content.variant_name(layout)
    run = _run(view, arm, name, tags, points, place=place, status="FAILED" if broken else "FINISHED")
    changes = changes_of(view.whole_blocks.pairs(arm.name))
    return replace(run, texts={**run.texts, KERNELS_FILE: kernels_csv(changes)}) if changes else run


def _improvement(variant: VariantVerdict) -> dict[str, float]:
    """Return the improvement in percent, by which the view of variants sorts; empty if there is none."""
    gain = improvement_pct(variant)
    return {views.IMPROVEMENT: gain} if variant.other_work is None and math.isfinite(gain) else {}


def _note(layout: VariantLayout) -> str:
    """Return the sentence, the reason if the sentence lacks it, and the remarks."""
    parts = (layout.sentence, layout.why, *layout.remarks)
    return wording.shorten("\n\n".join(text for text in parts if text), content.LONGEST_TAG)


def _baseline(view: AblationView, verdict: Verdict, *, place: int) -> content.RunContent:
    arm = view.plan.baseline
    noise = (
        f"`{DIFFERENCE}` is its difference from itself in A/A blocks of the same devices, in time order."
        if verdict.circumstances.admission.calibrations
        else "The devices that ran have no A/A blocks, so there is no noise to show."
    )
    tags = {content.NOTE_TAG: f"The variants are compared with this arm. {noise}"}
    return _run(view, arm, content.run_name(arm.name), tags, tuple(_noise(view, verdict)), place=place)


def _run(
    view: AblationView,
    arm: Arm,
    name: str,
    tags: dict[str, str],
    points: tuple[content.Point, ...],
    *,
    place: int,
    status: str = "FINISHED",
) -> content.RunContent:
    """Return an arm's run. MLflow lists the newest run first, so the best arm starts a few ms later than the others."""
    identity = f"arm/{arm.name}"
    receipts = view.whole_blocks.of(arm.name)
    at_ms = content.ended_ms(view)
    own = {"ablation.arm": arm.name, "ablation.role": arm.role, "ablation.arm_digest": arm.digest}
    own["ablation.nodes"] = wording.shorten(wording.of_arm(view.arms[arm.name], receipts), content.LONGEST_TAG)
    return content.finite(
        content.RunContent(
            identity=identity,
            name=name,
            status=status,
            started_ms=at_ms - place,
            ended_ms=at_ms,
            tags=content.common_tags(view, content.RunKind.ARM, identity) | own | content.source_tags(receipts) | tags,
            params=content.params(arm),
            points=(*_numbers(view, _means(view.arms[arm.name])), *points, *_band_points(view, receipts)),
            texts=_trace_of(view, arm.name),
            datasets=content.datasets(receipts),
        )
    )


def _trace_of(view: AblationView, arm: str) -> dict[str, str]:
    """Return the file of the profiled step over time; none without one."""
    trace = traces(view).get(arm)
    return {} if trace is None else {TRACE_FILE: chrome_trace(f"{view.name}: {arm}", trace)}


def _numbers(view: AblationView, values: Mapping[str, float]) -> Iterator[content.Point]:
    """Yield values of the whole ablation; their step is the number of blocks that count."""
    at_ms, step = content.ended_ms(view), len(view.whole_blocks.blocks)
    return (content.Point(name, value, at_ms, step) for name, value in values.items())


def _means(summary: ArmSummary) -> dict[str, float]:
    """Return an arm's means and peaks under the metric names of its trials."""
    names = (
        "tokens_per_s",
        "step_s",
        "model_tflops_per_s",
        "utilisation",
        "compile_s",
        "loss_step1",
        "loss_final",
        "loss_val",
    )
    values = {name: getattr(summary, name) for name in names}
    for name in ("peak_allocated", "peak_reserved"):
        peak = getattr(summary, f"{name}_bytes")
        values[f"{name}_gib"] = None if peak is None else peak / GIB
    return {name: value for name, value in values.items() if value is not None}


def _differences(view: AblationView, arm: str) -> Iterator[content.Point]:
    if view.answer is None:
        return
    ended = {pair.block_index: content.receipt_ended_ms(pair.variant) for pair in view.whole_blocks.pairs(arm)}
    for block_index, change in view.changes(arm, view.answer.rule.metric).items():
        yield content.Point(DIFFERENCE, change, ended[block_index], block_number(block_index))


def _noise(view: AblationView, verdict: Verdict) -> Iterator[content.Point]:
    """Yield the A/A blocks of all devices that ran, in time order, and their standard deviation."""
    calibrations = verdict.circumstances.admission.calibrations
    samples = sorted((sample for one in calibrations for sample in one.samples), key=lambda sample: sample.started_at)
    for number, sample in enumerate(samples, start=1):
        yield content.Point(DIFFERENCE, percent(sample.difference), content.milliseconds(sample.started_at), number)
    if calibrations:
        yield from _numbers(view, {"sd_pct": max(one.sd_pct for one in calibrations)})


def is_open(state: AblationState) -> bool:
    """Return whether an ablation is still running; MLflow then has only its parent run."""
    return STATUS[state] in OPEN


def children(view: AblationView) -> Iterator[RunContent]:
    """Yield the runs of trials, then of arms; none while the ablation is running."""
    if not is_open(view.state):
        yield from trial_runs(view)
        yield from arm_runs(view)


def plots(view: AblationView) -> dict[str, str]:
    """Return the pictures of the report as SVG files by path; none while the ablation is running."""
    drawn = () if is_open(view.state) else registry.draw_all(view)
    return {f"plots/{picture.name}.svg": picture.standalone() for picture in drawn}
