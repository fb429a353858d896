"""One MLflow run per arm: a variant's answer, under metric names that are the same in every ablation.

`difference_pct` over the blocks is the paired difference of a variant, and for the baseline the difference in A/A
blocks. One chart thus shows the effects beside the noise.
"""

import math
from collections.abc import Iterator, Mapping

from experiments.analysis.statistics import percent
from experiments.analysis.verdicts import ArmSummary, VariantVerdict, Verdict
from experiments.block_numbers import block_number
from experiments.design.arms import Arm
from experiments.reporting import wording
from experiments.reporting.mlflow import content, views
from experiments.reporting.sentences import WITHOUT_STATISTICS
from experiments.reporting.verdict_layout import VariantLayout, improvement_pct
from experiments.reporting.view import AblationView
from experiments.reporting.wording import changed_gates
from model.measurements import GIB

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
        "ablation.gates": changed_gates(arm, view.plan.baseline),
        "ablation.metric": metric,
        content.NOTE_TAG: _note(layout),
    }
    points = (*_numbers(view, layout.numbers | _improvement(variant)), *_differences(view, variant.arm))
    name = content.variant_name(layout)
    return _run(view, arm, name, tags, points, place=place, status="FAILED" if broken else "FINISHED")


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
            points=(*_numbers(view, _means(view.arms[arm.name])), *points),
            datasets=content.datasets(receipts),
        )
    )


def _numbers(view: AblationView, values: Mapping[str, float]) -> Iterator[content.Point]:
    """Yield values of the whole ablation; their step is the number of blocks that count."""
    at_ms, step = content.ended_ms(view), len(view.whole_blocks.blocks)
    return (content.Point(name, value, at_ms, step) for name, value in values.items())


def _means(summary: ArmSummary) -> dict[str, float]:
    """Return an arm's means and peaks under the metric names of its trials."""
    names = ("tokens_per_s", "step_s", "model_tflops_per_s", "mfu", "compile_s", "loss_step1", "loss_final", "loss_val")
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
