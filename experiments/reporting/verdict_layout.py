"""A verdict laid out once: the words, sentences, tables and numbers that terminal, Markdown, page and MLflow show.

Renderers (`service.cli.tables`, `markdown`, `report`, `mlflow_runs`) decide how it looks and nothing of what it says.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from experiments.analysis.answer import gain_pct
from experiments.analysis.verdicts import Cause, VariantVerdict, Verdict
from experiments.design.metrics import METRICS, WINDOW_METRICS
from experiments.reporting import sentences, verdict_cells, wording
from experiments.reporting.table import Cell, Table, numbers, row, texts


def short_answer(verdict: Verdict) -> str:
    """Return for example "chunk-8 better, +12.30 % throughput, and 3 more"; the page and `verdict` say the rest."""
    layout = lay_out(verdict)
    first, *others = layout.variants
    metric = wording.metric(layout.rule.metric)
    effect = [] if first.effect.text == wording.NOTHING else [f"{first.effect.text} {metric}"]
    more = [f"and {len(others)} more"] if others else []
    lacks = f": {first.missing}" if first.missing else ""
    return ", ".join([f"{first.arm} {first.word.text}", *effect, *more]) + lacks


SPEED_UNJUDGED = "speeds are not judged"


class PrimaryRule(NamedTuple):
    """The part of the rule that decides on the primary metric."""

    metric: str
    margin_pct: float
    adopt_from_pct: float
    """Change from which the rule adopts: negative for a metric of which less is better."""


@dataclass(frozen=True, kw_only=True)
class VariantLayout:
    """One variant's answer."""

    arm: str
    word: Cell
    sentence: str
    """What happened, with the interval."""
    reason: str
    """Why this word, as the verdict holds it."""
    why: str
    """The reason again where the sentence does not hold it; else empty."""
    missing: str
    """What is missing and why, blocks or the baseline, where that is why it has no answer; else empty."""
    effect: Cell
    interval: Cell
    """Of the effect; where the metric is exact, whether every repeat agrees."""
    mde: Cell
    values: tuple[Cell, Cell]
    """Of an exact metric: the baseline's and the variant's."""
    memory: Cell
    loss: Cell
    decision: Cell
    statistics: tuple[Cell, ...]
    """What stands behind effect and interval, in the order of `verdict_cells.STATISTICS`; empty without statistics."""
    gates_live: Cell
    requirements: tuple[tuple[Cell, ...], ...]
    """One row for each requirement of the rule: metric, rule, result, what was found."""
    remarks: tuple[str, ...]
    """What would help, and the verdict's own notes."""

    @property
    def numbers(self) -> dict[str, float]:
        """Every number of its cells by name, unrounded."""
        cells = (self.effect, self.interval, self.mde, *self.values, self.memory, *self.statistics)
        return {name: value for cell in cells for name, value in cell.numbers.items()}


@dataclass(frozen=True, kw_only=True)
class VerdictLayout:
    """The whole answer."""

    heading: str
    """What was run: blocks, node class, baseline."""
    caveat: str
    """What holds for every word: that none may be published, that the question was asked before; else empty."""
    lead: str
    """The decisions on all variants in one sentence."""
    rule: PrimaryRule
    variants: tuple[VariantLayout, ...]
    """The largest improvement first; then what does other work, or has no numbers. Every table has this order."""
    answers: Table
    """One row for each variant: the table that every medium shows."""
    statistics: Table
    requirements: Table
    other_metrics: Table

    @property
    def tables(self) -> tuple[Table, ...]:
        """The answers, then the tables behind them; those without rows are left out."""
        every = (self.answers, self.statistics, self.requirements, self.other_metrics)
        return tuple(table for table in every if table.rows)


def lay_out(verdict: Verdict) -> VerdictLayout:
    """Lay out `verdict`."""
    judged = sorted(verdict.variants, key=_place, reverse=True)
    variants = tuple(_lay_out_variant(verdict, variant) for variant in judged)
    nodes = wording.of_baseline(verdict)
    where = verdict.node_class if nodes is None else f"{verdict.node_class} ({wording.blocks_of(nodes)})"
    heading = f"{verdict.blocks_counted}/{verdict.blocks_planned} blocks on {where}, against {verdict.baseline}"
    return VerdictLayout(
        heading=heading,
        caveat="; ".join(_caveats(verdict)),
        lead=sentences.without_baseline(verdict) or sentences.lead(judged),
        rule=_primary_rule(verdict.rule),
        variants=variants,
        answers=_exact_table(variants) if is_exact(verdict) else _answers_table(verdict, variants),
        statistics=_statistics_table(variants),
        requirements=_requirements_table(variants),
        other_metrics=_other_metrics_table(verdict, judged),
    )


def _place(variant: VariantVerdict) -> tuple[bool, float]:
    """Return by what variants are sorted, the best highest: other work comes after all that can be compared."""
    gain = improvement_pct(variant)
    return variant.other_work is None and gain > -math.inf, gain


def improvement_pct(variant: VariantVerdict) -> float:
    """Return the effect in percent, positive where it is for the better, the least over the seeds; -inf without one."""
    if variant.exact is not None and variant.exact.seeds:
        return min(variant.exact.gains_pct)
    return -math.inf if variant.primary is None else gain_pct(variant.primary)


def is_exact(verdict: Verdict) -> bool:
    """Say whether values decide, not statistics: then neither calibration nor the number of askings matters."""
    return METRICS[verdict.rule["primary"]["metric"]].decides == "exact"


def speed_unjudged(verdict: Verdict) -> bool:
    """Say whether speeds are known and stand there without a judgement: the rule decides on something else."""
    known = any(arm.tokens_per_s is not None for arm in verdict.arms.values())
    return known and verdict.rule["primary"]["metric"] not in WINDOW_METRICS


def words_capped(verdict: Verdict) -> str | None:
    """Return why no word beyond inconclusive is published; None where one may be, or no arm has numbers for one."""
    named = all(variant.verdict in sentences.WITHOUT_STATISTICS for variant in verdict.variants)
    return None if named or is_exact(verdict) else verdict.circumstances.admission.refused_because


def _caveats(verdict: Verdict) -> Iterator[str]:
    if speed_unjudged(verdict):
        yield SPEED_UNJUDGED
    if is_exact(verdict):
        return
    refused, asking = words_capped(verdict), verdict.circumstances.family.number
    if refused is not None:
        command = verdict.circumstances.admission.mended_by
        mended = f"; to change that: {command}" if command else ""
        yield f"{refused}, so no word beyond inconclusive is published{mended}"
    if asking > 1:
        yield f"asking {asking} of this question"


def _primary_rule(rule: Mapping[str, Any]) -> PrimaryRule:
    primary = rule["primary"]
    sign = -1 if METRICS[primary["metric"]].better == "lower" else 1
    return PrimaryRule(primary["metric"], primary["margin_pct"], sign * primary["adopt_if_pct"])


def _answers_table(verdict: Verdict, variants: Sequence[VariantLayout]) -> Table:
    return Table(
        title="Verdict",
        columns=(
            *texts("variant", "verdict"),
            *numbers("effect", interval_heading(verdict), "MDE", "memory"),
            *texts("loss", "decision"),
        ),
        rows=tuple(row(v.arm, v.word, v.effect, v.interval, v.mde, v.memory, v.loss, v.decision) for v in variants),
        note="Effect: mean over blocks of the paired difference, without the effect of places in the block. Interval: "
        "for all variants together and all askings of the question. MDE: the smallest effect that is found with "
        f"80{wording.SPACE}% power. Memory: change of the largest peak in tensors. Loss: the requirements on it.",
    )


def _exact_table(variants: Sequence[VariantLayout]) -> Table:
    return Table(
        title="Verdict",
        columns=(
            *texts("variant", "verdict"),
            *numbers("effect", "of the baseline", "of the variant"),
            *texts("repeats", "loss", "decision"),
        ),
        rows=tuple(row(v.arm, v.word, v.effect, *v.values, v.interval, v.loss, v.decision) for v in variants),
        note="A metric without noise: an arm gives the same value whenever it runs again with the same seed, so there "
        "is no interval. Repeats: whether they agree here, bit for bit. Loss: the requirements on it.",
    )


def interval_heading(verdict: Verdict) -> str:
    """Name the intervals by their confidence, where it is the same for all variants."""
    found = (one for v in verdict.variants for one in (v.primary, *v.secondary) if one is not None)
    alphas = {one.alpha for one in found}
    return f"{wording.confidence(alphas.pop())} interval" if len(alphas) == 1 else "interval"


def _statistics_table(variants: Sequence[VariantLayout]) -> Table:
    ratio = f"100{wording.SPACE}ln(variant{wording.SPACE}/{wording.SPACE}baseline)"
    return Table(
        title="Statistics",
        columns=(*texts("variant"), *numbers(*verdict_cells.STATISTICS, "gates live")),
        rows=tuple(row(v.arm, *v.statistics, v.gates_live) for v in variants if v.statistics),
        note="Median: of the blocks. By median step: the effect that each window's median step gives, which stalls do "
        "not move. Slow steps: outliers of the variant against the baseline's; none is left out. Place: the effect of "
        "standing one place later in the block. p, flip: exact sign-flip test, which does not decide. p, differs: "
        "paired t test; p, same: two one-sided tests; both corrected over the variants (Holm), and these decide. "
        f"sd: of {ratio} from block to block.",
    )


def _requirements_table(variants: Sequence[VariantLayout]) -> Table:
    return Table(
        title="Requirements",
        columns=texts("variant", "metric", "rule", "result", "found"),
        rows=tuple(row(v.arm, *cells) for v in variants for cells in v.requirements),
    )


def _other_metrics_table(verdict: Verdict, variants: Sequence[VariantVerdict]) -> Table:
    return Table(
        title="Other metrics",
        columns=(*texts("variant", "metric"), *numbers("effect", interval_heading(verdict), "blocks")),
        rows=tuple(
            row(
                variant.arm,
                wording.metric(found.metric),
                verdict_cells.effect(found),
                verdict_cells.interval(found),
                f"{found.blocks:,}",
            )
            for variant in variants
            for found in variant.secondary
        ),
        note="For information: the rule does not decide on these.",
    )


def _missing(variant: VariantVerdict) -> str:
    if variant.no_baseline is not None:
        return f"the baseline {variant.no_baseline}"
    return sentences.missing(variant) if variant.cause is Cause.MISSING else ""


def _lay_out_variant(verdict: Verdict, variant: VariantVerdict) -> VariantLayout:
    found = variant.primary
    return VariantLayout(
        arm=variant.arm,
        word=verdict_cells.word(variant),
        sentence=sentences.sentence(verdict, variant),
        reason=wording.with_minus(variant.reason),
        why="" if sentences.says_why(variant) else wording.with_minus(variant.reason),
        missing=_missing(variant),
        effect=verdict_cells.exact_effect(variant.exact) if found is None else verdict_cells.effect(found),
        interval=verdict_cells.repeats(variant.exact) if found is None else verdict_cells.interval(found),
        mde=verdict_cells.detectable(found),
        values=verdict_cells.values(variant.exact),
        memory=verdict_cells.memory(verdict, variant.arm),
        loss=verdict_cells.loss(verdict, variant.requirements),
        decision=Cell(text=variant.decision.value),
        statistics=() if found is None else verdict_cells.statistics(found),
        gates_live=Cell(text=variant.gates_live),
        requirements=tuple(verdict_cells.requirement(result) for result in variant.requirements),
        remarks=sentences.remarks(verdict, variant),
    )
