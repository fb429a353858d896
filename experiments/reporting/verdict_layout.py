"""A verdict laid out once: the words, sentences, tables and numbers that terminal, Markdown, page and MLflow show.

Renderers (`service.cli.show`, `markdown`, `report`, `mlflow_runs`) decide how it looks and nothing of what it says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from experiments.analysis.exact import ExactComparison
from experiments.analysis.verdicts import Comparison, RequirementResult, VariantVerdict, Verdict
from experiments.design.metrics import METRICS
from experiments.outcomes import Decision, VerdictWord
from experiments.reporting import wording
from experiments.reporting.table import Cell, Table, Tone, numbers, row, texts

WORDS: dict[VerdictWord, tuple[str, Tone]] = {
    VerdictWord.BETTER: ("\N{BLACK UP-POINTING TRIANGLE}", Tone.GOOD),
    VerdictWord.SAME: ("\N{IDENTICAL TO}", Tone.NEUTRAL),
    VerdictWord.WORSE: ("\N{BLACK DOWN-POINTING TRIANGLE}", Tone.BAD),
    VerdictWord.INCONCLUSIVE: ("?", Tone.OPEN),
    VerdictWord.INVALID: ("!", Tone.BROKEN),
    VerdictWord.REFUSED: ("\N{CIRCLED DIVISION SLASH}", Tone.BROKEN),
    VerdictWord.OOM: ("\N{BLACK SQUARE}", Tone.BAD),
    VerdictWord.TIMEOUT: ("\N{WATCH}", Tone.BAD),
    VerdictWord.FAILED: ("\N{MULTIPLICATION SIGN}", Tone.BROKEN),
}
"""Sign and tone of every word."""

WITHOUT_STATISTICS: dict[VerdictWord, str] = {
    VerdictWord.INVALID: "has no valid measurement",
    VerdictWord.REFUSED: "was refused: a gate that was asked for was not live",
    VerdictWord.OOM: "ran out of memory",
    VerdictWord.TIMEOUT: "took longer than a trial may",
    VerdictWord.FAILED: "failed before it could be measured",
}

LEADS: dict[Decision, str] = {
    Decision.ADOPT: "adopt {}",
    Decision.REJECT: "do not adopt {}",
    Decision.SAME: "no practical difference for {}",
    Decision.INCONCLUSIVE: "not decided for {}",
    Decision.INVALID: "no valid measurement of {}",
}
"""Decisions as clauses of the leading sentence, in its order."""

ABSENT = Cell(text=wording.NOTHING)


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
    """Why this word."""
    effect: Cell
    interval: Cell
    mde: Cell
    memory: Cell
    loss: Cell
    decision: Cell
    statistics: tuple[Cell, ...]
    """Median, the two p values, sd, number of blocks."""
    gates_live: Cell
    requirements: tuple[tuple[Cell, ...], ...]
    """One row for each requirement of the rule: metric, rule, result, what was found."""
    remarks: tuple[str, ...]
    """What was capped, what would resolve it, and the verdict's own notes."""

    @property
    def numbers(self) -> dict[str, float]:
        """Every number of its cells by name, unrounded."""
        cells = (self.effect, self.interval, self.mde, self.memory, *self.statistics)
        return {name: value for cell in cells for name, value in cell.numbers.items()}


@dataclass(frozen=True, kw_only=True)
class VerdictLayout:
    """The whole answer."""

    heading: str
    """What was run: blocks, node class, baseline."""
    caveat: str
    """What caps every word; empty where nothing does."""
    lead: str
    """The decisions on all variants in one sentence."""
    rule: PrimaryRule
    variants: tuple[VariantLayout, ...]
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
    variants = tuple(_lay_out_variant(verdict, variant) for variant in verdict.variants)
    node_class = verdict.node_class
    return VerdictLayout(
        heading=f"{verdict.blocks_counted}/{verdict.blocks_planned} blocks on {node_class}, against {verdict.baseline}",
        caveat=f"node class {node_class} is not calibrated, so no word beyond inconclusive is published"
        if _capped(verdict)
        else "",
        lead=_lead(verdict),
        rule=_primary_rule(verdict.rule),
        variants=variants,
        answers=_answers_table(variants),
        statistics=_statistics_table(variants),
        requirements=_requirements_table(variants),
        other_metrics=_other_metrics_table(verdict),
    )


def _capped(verdict: Verdict) -> bool:
    """Say whether a word could not be published: exact metrics need no calibration."""
    return not verdict.calibrated and METRICS[verdict.rule["primary"]["metric"]].decides == "paired"


def _primary_rule(rule: Mapping[str, Any]) -> PrimaryRule:
    primary = rule["primary"]
    sign = -1 if METRICS[primary["metric"]].better == "lower" else 1
    return PrimaryRule(primary["metric"], primary["margin_pct"], sign * primary["adopt_if_pct"])


def _lead(verdict: Verdict) -> str:
    arms = {decision: [v.arm for v in verdict.variants if v.decision is decision] for decision in LEADS}
    clauses = [say.format(wording.listed(arms[decision])) for decision, say in LEADS.items() if arms[decision]]
    sentence = "; ".join(clauses)
    return f"{sentence[:1].upper()}{sentence[1:]}."


def _answers_table(variants: Sequence[VariantLayout]) -> Table:
    return Table(
        title="Verdict",
        columns=(
            *texts("variant", "verdict"),
            *numbers("effect", "95 % interval", "MDE", "memory"),
            *texts("loss", "decision"),
        ),
        rows=tuple(row(v.arm, v.word, v.effect, v.interval, v.mde, v.memory, v.loss, v.decision) for v in variants),
        note="Effect: mean over blocks of the paired difference. MDE: the smallest effect that is found with "
        f"80{wording.SPACE}% power. Memory: change of the largest peak in tensors. Loss: the requirements on it.",
    )


def _statistics_table(variants: Sequence[VariantLayout]) -> Table:
    return Table(
        title="Statistics",
        columns=(*texts("variant"), *numbers("median", "p", "p, Holm", "sd", "blocks", "gates live")),
        rows=tuple(row(v.arm, *v.statistics, v.gates_live) for v in variants),
        note="p: exact sign-flip test, two-sided, which does not decide; Holm: paired t test, corrected over the "
        f"variants. sd: of 100{wording.SPACE}ln(variant{wording.SPACE}/{wording.SPACE}baseline) from block to block.",
    )


def _requirements_table(variants: Sequence[VariantLayout]) -> Table:
    return Table(
        title="Requirements",
        columns=texts("variant", "metric", "rule", "result", "found"),
        rows=tuple(row(v.arm, *cells) for v in variants for cells in v.requirements),
    )


def _other_metrics_table(verdict: Verdict) -> Table:
    return Table(
        title="Other metrics",
        columns=(*texts("variant", "metric"), *numbers("effect", "95 % interval", "blocks")),
        rows=tuple(
            row(variant.arm, wording.metric(found.metric), _effect(found), _interval(found), str(found.blocks))
            for variant in verdict.variants
            for found in variant.secondary
        ),
        note="For information: the rule does not decide on these.",
    )


def _lay_out_variant(verdict: Verdict, variant: VariantVerdict) -> VariantLayout:
    found = variant.primary
    effect, interval = _exact_effect(variant.exact) if found is None else (_effect(found), _interval(found))
    return VariantLayout(
        arm=variant.arm,
        word=_word(verdict, variant),
        sentence=_sentence(variant),
        reason=variant.reason,
        effect=effect,
        interval=interval,
        mde=ABSENT if found is None else _cell(wording.size_percent(found.mde_pct), mde_pct=found.mde_pct),
        memory=_memory(verdict, variant.arm),
        loss=_loss(verdict, variant.requirements),
        decision=Cell(text=variant.decision.value),
        statistics=(ABSENT,) * 5 if found is None else _statistics(found),
        gates_live=Cell(text=variant.gates_live),
        requirements=tuple(_requirement(result) for result in variant.requirements),
        remarks=_remarks(verdict, variant),
    )


def _cell(text: str, **numbers: float) -> Cell:
    return Cell(text=text, numbers=numbers)


def _word(verdict: Verdict, variant: VariantVerdict) -> Cell:
    sign, tone = WORDS[variant.verdict]
    note = ""
    if variant.measured is not variant.verdict:
        why = "" if not _capped(verdict) or variant.verdict is not VerdictWord.INCONCLUSIVE else "uncalibrated; "
        note = f"{why}samples say {variant.measured.value}"
    return Cell(text=variant.verdict.value, sign=sign, tone=tone, note=note)


def _effect(found: Comparison) -> Cell:
    return _cell(wording.percent(found.delta_pct), delta_pct=found.delta_pct)


def _interval(found: Comparison) -> Cell:
    low, high = found.ci_low_pct, found.ci_high_pct
    return _cell(wording.interval(low, high), ci_low=low, ci_high=high)


def _exact_effect(found: ExactComparison | None) -> tuple[Cell, Cell]:
    """Return the change of every seed, and in place of the interval that it has no noise."""
    if found is None or not found.seeds:
        return ABSENT, ABSENT
    changes = sorted({pair.change_pct for pair in found.seeds if pair.change_pct is not None})
    exact = Cell(text="NOT exact" if found.problems else "exact")
    if len(changes) == 1:
        return _cell(wording.percent(changes[0]), delta_pct=changes[0]), exact
    if not changes:
        return Cell(text="from 0"), exact
    return Cell(text=wording.interval(changes[0], changes[-1])), exact


def _statistics(found: Comparison) -> tuple[Cell, ...]:
    return (
        _cell(wording.percent(found.median_pct), median_pct=found.median_pct),
        _cell(wording.number(found.p_sign_flip, 3), p_sign_flip=found.p_sign_flip),
        _cell(wording.number(found.p_holm, 3), p_holm=found.p_holm),
        _cell(wording.size_percent(found.sd_pct), sd_pct=found.sd_pct),
        _cell(str(found.blocks), blocks=found.blocks),
    )


def _memory(verdict: Verdict, arm: str) -> Cell:
    """Return the change of the arm's peak memory in tensors."""
    own, base = (verdict.arms[name].peak_allocated_bytes for name in (arm, verdict.baseline))
    if own is None or base is None:
        return ABSENT
    return _cell(wording.bytes_change(own - base), memory_delta_mib=(own - base) / 2**20)


def _loss(verdict: Verdict, judged: Sequence[RequirementResult]) -> Cell:
    """Return whether the requirements on the loss hold; a variant without statistics is not held to them."""
    if not any(asked["metric"].startswith("loss") for asked in verdict.rule["require"]):
        return Cell(text="not asked")
    results = [result for result in judged if result.metric.startswith("loss")]
    broken = [result.metric for result in results if not result.passed]
    if not results:
        return ABSENT
    return Cell(text=f"FAILED: {', '.join(broken)}", tone=Tone.BAD) if broken else Cell(text="ok", tone=Tone.GOOD)


def _requirement(found: RequirementResult) -> tuple[Cell, ...]:
    result = Cell(text="passed", tone=Tone.GOOD) if found.passed else Cell(text="FAILED", tone=Tone.BAD)
    return row(found.metric, found.rule, result, found.detail)


def _sentence(variant: VariantVerdict) -> str:
    found = variant.primary
    if variant.exact is not None:
        return _exact_sentence(variant.exact)
    if found is None:
        return f"It {WITHOUT_STATISTICS.get(variant.verdict, 'has no statistics')}."
    name = wording.metric(found.metric)
    return (
        f"{name[:1].upper()}{name[1:]} changed by {_effect(found)}, 95{wording.SPACE}% interval {_interval(found)}, "
        f"over {wording.counted(found.blocks, 'block')}."
    )


def _exact_sentence(found: ExactComparison) -> str:
    name = wording.metric(found.metric)
    name = f"{name[:1].upper()}{name[1:]}"
    if found.problems:
        return f"{name} is not the same at every repeat, so it cannot be compared exactly."
    blocks = wording.counted(found.blocks, "block")
    if not any(pair.change for pair in found.seeds):
        return f"{name} is the same, bit for bit, over {blocks}."
    pairs = dict.fromkeys(
        f"from {wording.quantity(found.metric, pair.baseline)} to {wording.quantity(found.metric, pair.variant)}"
        for pair in found.seeds
    )
    change = _exact_effect(found)[0]
    return f"{name} changed by {change}, {', '.join(pairs)}, the same at every repeat over {blocks}."


def _remarks(verdict: Verdict, variant: VariantVerdict) -> tuple[str, ...]:
    remarks = []
    if variant.measured is not variant.verdict:
        why = "" if not _capped(verdict) else f", because node class {verdict.node_class} is not calibrated"
        remarks.append(
            f"The samples alone say {variant.measured.value}; it is published as {variant.verdict.value}{why}."
        )
    if variant.blocks_needed is not None:
        cost = variant.device_minutes_needed
        minutes = "" if cost is None else f", about {wording.counted(round(cost), 'device minute')} more"
        remarks.append(
            f"About {wording.counted(variant.blocks_needed, 'block')} in all would resolve the margin{minutes}."
        )
    return (*remarks, *variant.notes)
