"""A verdict as words, sentences, tables and numbers, the same for terminal, Markdown, page and MLflow.

Renderers decide how the layout looks; they add no content.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ablate.experiments.analysis.verdicts import NOT_OBSERVED, Cause, ControlResult, VariantVerdict, Verdict
from ablate.experiments.design.metrics import LOSS_METRICS, METRICS, TARGET_METRICS, WINDOW_METRICS
from ablate.experiments.outcomes import DECLARED, Decision, VerdictWord
from ablate.experiments.reporting import sentences, verdict_cells, wording
from ablate.experiments.reporting.kernel_tables import kernels_table, launches_table
from ablate.experiments.reporting.outlook import outlook
from ablate.experiments.reporting.sentences import improvement_pct
from ablate.experiments.reporting.table import Cell, Table, numbers, row, texts


def short_answer(verdict: Verdict) -> str:
    """Return the most important answer, for example "chunk-8 better, +12.30 % throughput, and 3 more"."""
    layout = lay_out(verdict)
    if verdict.own_noise is not None:
        return layout.lead.removesuffix(".")
    first, *others = by_importance(verdict, layout)
    metric = wording.metric(layout.rule.metric)
    variant = next(one for one in verdict.variants if one.arm == first.arm)
    shrunk = sentences.shrunk_percent(variant)
    less = "" if shrunk is None else f" (shrunk {shrunk})"
    effect = [] if first.effect.text == wording.NOTHING else [f"{first.effect.text} {metric}{less}"]
    more = [f"and {len(others)} more"] if others else []
    lacks = f": {first.missing}" if first.missing else ""
    other = "; a program reported another number than counts" if variant.contradictions else ""
    return ", ".join([f"{first.arm} {first.word.text}", *effect, *more]) + lacks + other


def by_importance(verdict: Verdict, layout: "VerdictLayout") -> tuple["VariantLayout", ...]:
    """Return the variants as a summary needs them: decided ones first, of these the adopted; each by size of effect."""
    judged = {variant.arm: variant for variant in verdict.variants}

    def rank(one: "VariantLayout") -> tuple[int, float]:
        variant = judged[one.arm]
        size = improvement_pct(variant)
        kinds = (
            variant.decision is Decision.ADOPT,
            variant.decision is Decision.REJECT and math.isfinite(size),
            variant.decision is Decision.SAME,
            variant.measured in (VerdictWord.BETTER, VerdictWord.WORSE),
            True,
        )
        return kinds.index(True), -abs(size) if math.isfinite(size) else 0.0

    return tuple(sorted(layout.variants, key=rank))


SPEED_UNJUDGED = "speeds are not judged"


REPEATS = "repeats the baseline"


class PrimaryRule(NamedTuple):
    """The rule for the primary metric."""

    metric: str
    margin_pct: float
    adopt_from_pct: float
    """Smallest change that the rule adopts; negative if lower is better."""


@dataclass(frozen=True, kw_only=True)
class VariantLayout:
    """One variant's answer."""

    arm: str
    word: Cell
    sentence: str
    """What happened, with the interval."""
    why: str
    """The verdict's own reason if the sentence lacks it; else empty."""
    missing: str
    """Which blocks are missing, or how the baseline ended, if that prevents an answer; else empty."""
    effect: Cell
    interval: Cell
    """Of the effect; for an exact metric, whether the repeats agree."""
    mde: Cell
    values: tuple[Cell, Cell]
    """Baseline and variant, for an exact metric."""
    memory: Cell
    loss: Cell
    decision: Cell
    statistics: tuple[Cell, ...]
    """Numbers behind effect and interval, in the order of `verdict_cells.STATISTICS`; empty without statistics."""
    gates_live: Cell
    requirements: tuple[tuple[Cell, ...], ...]
    """One row per requirement of the rule: metric, rule, result, detail."""
    remarks: tuple[str, ...]
    """What would help, and the verdict's own notes."""

    @property
    def numbers(self) -> dict[str, float]:
        """All numbers of its cells by name, unrounded."""
        cells = (self.effect, self.interval, self.mde, *self.values, self.memory, *self.statistics)
        return {name: value for cell in cells for name, value in cell.numbers.items()}


@dataclass(frozen=True, kw_only=True)
class VerdictLayout:
    """The whole answer."""

    heading: str
    """Blocks, node class and baseline."""
    has_finding: bool
    """Whether the lead holds a result that no table has."""
    caveat: str
    """Limits of every verdict, for example that none may be published or that the question is repeated; or empty."""
    lead: str
    """The decisions on all variants in one sentence; in a second one the largest micro-batch that fits."""
    outlook: tuple[str, ...]
    """What undecided samples say so far, and how to continue."""
    rule: PrimaryRule
    variants: tuple[VariantLayout, ...]
    """Largest improvement first, then variants with other work or without numbers; all tables have this order."""
    answers: Table
    """One row per variant; every medium shows this table."""
    statistics: Table
    requirements: Table
    other_metrics: Table
    kernels: tuple[Table, ...]
    """Kernels of each variant with a profiled step, and their launches where torch's profiler knows them."""

    @property
    def tables(self) -> tuple[Table, ...]:
        """The answers, then the tables behind them, without empty tables and those of `kernels`."""
        every = (self.answers, self.statistics, self.requirements, self.other_metrics)
        return tuple(table for table in every if table.rows)


def lay_out(verdict: Verdict) -> VerdictLayout:
    """Return the layout of `verdict`."""
    judged = sorted(verdict.variants, key=_place, reverse=True)
    variants = tuple(_lay_out_variant(verdict, variant) for variant in judged)
    nodes = wording.of_baseline(verdict)
    where = verdict.node_class if nodes is None else f"{verdict.node_class} ({wording.blocks_of(nodes)})"
    blocks = f"{verdict.blocks_counted}/{verdict.blocks_planned} blocks on {where}"
    heading = f"{blocks}, {wording.metric(verdict.rule['primary']['metric'])} against {verdict.baseline}"
    return VerdictLayout(
        heading=heading,
        has_finding=verdict.own_noise is not None or verdict.largest_micro_batch is not None,
        caveat="; ".join(_caveats(verdict)),
        outlook=() if verdict.own_noise is not None else outlook(verdict, judged),
        lead=" ".join(_lead(verdict, judged)),
        rule=_primary_rule(verdict.rule),
        variants=variants,
        answers=_exact_table(verdict, variants) if is_exact(verdict) else _answers_table(verdict, variants),
        statistics=_statistics_table(variants),
        requirements=_requirements_table(variants),
        other_metrics=_other_metrics_table(verdict, judged),
        kernels=tuple(
            table
            for one in judged
            if one.step_kernels
            for table in (
                kernels_table(one.arm, one.step_kernels, verdict.node_class),
                launches_table(one.arm, one.step_kernels),
            )
            if table.rows
        ),
    )


def _lead(verdict: Verdict, judged: Sequence[VariantVerdict]) -> Iterator[str]:
    yield sentences.of_noise(verdict) or sentences.without_baseline(verdict) or _decisions(verdict, judged)
    if verdict.largest_micro_batch is not None:
        yield sentences.of_largest_micro_batch(verdict, verdict.largest_micro_batch)


def _decisions(verdict: Verdict, judged: Sequence[VariantVerdict]) -> str:
    return sentences.lead(judged, verdict.rule["primary"]["adopt_if_pct"])


def _place(variant: VariantVerdict) -> tuple[bool, float]:
    """Return the sort key of a variant, best highest; variants with other work come after comparable ones."""
    gain = improvement_pct(variant)
    return variant.other_work is None and gain > -math.inf, gain


def is_exact(verdict: Verdict) -> bool:
    """Return whether values decide instead of statistics; calibration and askings then do not matter."""
    return "exact" in verdict.rule["comparison"]


def speed_unjudged(verdict: Verdict) -> bool:
    """Return whether the verdict shows speeds that its rule does not judge."""
    has_speeds = any(arm.tokens_per_s is not None for arm in verdict.arms.values())
    return has_speeds and verdict.rule["primary"]["metric"] not in WINDOW_METRICS


def uncalibrated(verdict: Verdict) -> str | None:
    """Return why only `inconclusive` may be published; None without that limit, or if no arm has statistics."""
    no_numbers = all(variant.verdict in sentences.WITHOUT_STATISTICS for variant in verdict.variants)
    free = no_numbers or is_exact(verdict) or over_seeds(verdict)
    return None if free else verdict.circumstances.admission.refused_because


def contradictions(verdict: Verdict) -> Iterator[str]:
    """Yield the contradictions of programs, those of the baseline once."""
    yield from dict.fromkeys(text for variant in verdict.variants for text in variant.contradictions)


def without_effect(verdict: Verdict) -> Iterator[str]:
    """Yield the variants that equal the baseline in every block, although their settings differ."""
    if verdict.own_noise is not None:
        return
    metric, base = verdict.rule["primary"]["metric"], verdict.arms[verdict.baseline]
    for variant in verdict.variants:
        own, primary = verdict.arms[variant.arm], variant.primary
        losses_equal = all(getattr(own, loss) == getattr(base, loss) for loss in LOSS_METRICS)
        if primary is not None and losses_equal and not any(primary.differences_pct):
            same = f"{wording.metric(metric)} is identical to the baseline's in every block"
            yield f"{variant.arm}: {same}; perhaps the change has no effect"


def _caveats(verdict: Verdict) -> Iterator[str]:
    yield from contradictions(verdict)
    yield from without_effect(verdict)
    if speed_unjudged(verdict):
        yield SPEED_UNJUDGED
    if is_exact(verdict):
        return
    refused, asking = uncalibrated(verdict), verdict.circumstances.family.number
    if refused is not None:
        command = verdict.circumstances.admission.mended_by
        mended = f"; to calibrate: {command}" if command else ""
        yield f"uncalibrated: {refused}{mended}"
    if asking > 1:
        yield f"asking {asking} of this question"


def _primary_rule(rule: Mapping[str, Any]) -> PrimaryRule:
    primary = rule["primary"]
    better = primary.get("better") or METRICS[primary["metric"]].better
    sign = -1 if better == "lower" else 1
    return PrimaryRule(primary["metric"], primary["margin_pct"], sign * primary["adopt_if_pct"])


def over_seeds(verdict: Verdict) -> bool:
    """Return whether a loss decides by statistics over seeds."""
    return "calibration" in verdict.rule["comparison"]


def effect_in_words(verdict: Verdict) -> str:
    """Say how the effect is estimated."""
    if verdict.rule["primary"]["metric"] in TARGET_METRICS:
        return "Effect: variant / baseline, the geometric mean over the seeds."
    if over_seeds(verdict):
        return "Effect: mean difference over the seeds, in percent of the baseline's mean."
    return "Effect: mean paired difference over the blocks, corrected for the position in the block."


def _answers_table(verdict: Verdict, variants: Sequence[VariantLayout]) -> Table:
    loss = _loss_column(verdict)
    return Table(
        title="Verdict",
        columns=(
            *texts("variant", "verdict"),
            *numbers("effect", interval_heading(verdict), "memory"),
            *texts(*loss, "decision"),
        ),
        rows=(
            *(
                row(v.arm, v.word, v.effect, v.interval, v.memory, *[v.loss for _ in loss], v.decision)
                for v in variants
            ),
            *_control_row(verdict, loss),
        ),
        note=f"{effect_in_words(verdict)} Interval: simultaneous for all variants and all askings of the question. "
        f"Memory: change of the largest peak in tensors.{_of_loss(loss)}",
    )


def _control_row(verdict: Verdict, loss: Sequence[str]) -> Iterator[tuple[Cell, ...]]:
    """Yield the row of the control, below those of the variants, so that readers can compare."""
    if verdict.control is not None:
        memory = verdict_cells.memory(verdict, verdict.control.arm)
        cells = (*control_effect(verdict.control), memory)
        yield row(verdict.control.arm, REPEATS, *cells, *["" for _ in loss], "only noise")


def control_effect(control: ControlResult) -> tuple[Cell, Cell]:
    """Return the effect of the control and its interval."""
    return verdict_cells.effect(control.primary), verdict_cells.interval(control.primary)


def _loss_column(verdict: Verdict) -> tuple[str, ...]:
    """Return the heading of the requirements on the loss; none where a loss, or a number of the program, decides."""
    metric = METRICS.get(verdict.rule["primary"]["metric"])
    is_cost = metric is not None and metric.kind != "loss" and metric.name not in TARGET_METRICS
    return ("loss",) if is_cost or verdict_cells.requires_loss(verdict) else ()


def _of_loss(loss: Sequence[str]) -> str:
    return " Loss: its requirements." if loss else ""


def _exact_table(verdict: Verdict, variants: Sequence[VariantLayout]) -> Table:
    loss = _loss_column(verdict)
    return Table(
        title="Verdict",
        columns=(
            *texts("variant", "verdict"),
            *numbers("effect", "of the baseline", "of the variant"),
            *texts("repeats", *loss, "decision"),
        ),
        rows=tuple(
            row(v.arm, v.word, v.effect, *v.values, v.interval, *[v.loss for _ in loss], v.decision) for v in variants
        ),
        note="This metric has no noise: with the same seed, an arm repeats its value, so there is no interval. "
        f"Repeats: whether they agree here, bit for bit.{_of_loss(loss)}",
    )


def interval_heading(verdict: Verdict) -> str:
    """Return the heading of intervals, with their confidence if it is the same for all variants."""
    alphas = {one.alpha for v in verdict.variants for one in (v.primary, *v.secondary) if one is not None}
    return f"{wording.confidence(alphas.pop())} interval" if len(alphas) == 1 else "interval"


def _statistics_table(variants: Sequence[VariantLayout]) -> Table:
    ratio = f"100{wording.SPACE}ln(variant{wording.SPACE}/{wording.SPACE}baseline)"
    return Table(
        title="Statistics",
        columns=(*texts("variant"), *numbers(*verdict_cells.STATISTICS, "MDE", "gates live")),
        rows=tuple(row(v.arm, *v.statistics, v.mde, _counted_gates(v)) for v in variants if v.statistics),
        note="Median: over the blocks. By median step: the effect by the median step of each window, which stalls do "
        "not move. Slow steps: outliers of the variant against those of the baseline; all are counted. Place: the "
        "effect of one position later in the block. p, flip: exact sign-flip test, for information. p, differs: "
        "paired t test. p, same: two one-sided tests. Both decide, corrected over the variants (Holm). "
        f"sd: standard deviation of {ratio} between blocks. MDE: minimum detectable effect, the smallest that these "
        f"blocks prove with 80{wording.SPACE}% power.",
    )


def _counted_gates(variant: VariantLayout) -> str:
    text = variant.gates_live.text
    return wording.NOTHING if text == DECLARED else text.partition(f", {NOT_OBSERVED}")[0]


def _requirements_table(variants: Sequence[VariantLayout]) -> Table:
    return Table(
        title="Requirements",
        columns=texts("variant", "metric", "rule", "result", "detail"),
        rows=tuple(row(v.arm, *cells) for v in variants for cells in v.requirements),
    )


def _other_metrics_table(verdict: Verdict, variants: Sequence[VariantVerdict]) -> Table:
    return Table(
        title="Other metrics",
        columns=(*texts("variant", "metric"), *numbers("effect", interval_heading(verdict), "blocks")),
        rows=tuple(
            row(
                variant.arm,
                wording.metric(comparison.metric),
                verdict_cells.effect(comparison),
                verdict_cells.interval(comparison),
                f"{comparison.blocks:,}",
            )
            for variant in variants
            for comparison in variant.secondary
        ),
        note="For information only; the rule does not use them.",
    )


def _missing(variant: VariantVerdict) -> str:
    if variant.no_baseline is not None:
        return f"the baseline {variant.no_baseline}"
    return sentences.missing(variant) if variant.cause is Cause.MISSING else ""


def _lay_out_variant(verdict: Verdict, variant: VariantVerdict) -> VariantLayout:
    primary = variant.primary
    return VariantLayout(
        arm=variant.arm,
        word=verdict_cells.word(variant),
        sentence=sentences.sentence(verdict, variant),
        why="" if sentences.says_why(variant) else wording.with_minus(variant.reason),
        missing=_missing(variant),
        effect=verdict_cells.exact_effect(variant.exact) if primary is None else verdict_cells.effect(primary),
        interval=verdict_cells.repeats(variant.exact) if primary is None else verdict_cells.interval(primary),
        mde=verdict_cells.detectable(primary),
        values=verdict_cells.values(variant.exact),
        memory=verdict_cells.memory(verdict, variant.arm),
        loss=verdict_cells.loss(verdict, variant.requirements),
        decision=Cell(text=variant.decision.value),
        statistics=() if primary is None else verdict_cells.statistics(primary),
        gates_live=Cell(text=variant.gates_live),
        requirements=tuple(verdict_cells.requirement(result) for result in variant.requirements),
        remarks=sentences.remarks(verdict, variant),
    )
