"""Cells of a verdict's tables: verdict, effect, interval, memory, loss and requirements."""

from collections.abc import Sequence

from ablate.experiments.analysis.verdicts import (
    Cause,
    Comparison,
    ExactComparison,
    RequirementResult,
    VariantVerdict,
    Verdict,
)
from ablate.experiments.outcomes import VerdictWord
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.table import Cell, Tone, row

WORDS: dict[VerdictWord, tuple[str, Tone]] = {
    VerdictWord.BETTER: ("\N{BLACK UP-POINTING TRIANGLE}", Tone.GOOD),
    VerdictWord.SAME: ("\N{IDENTICAL TO}", Tone.NEUTRAL),
    VerdictWord.WORSE: ("\N{BLACK DOWN-POINTING TRIANGLE}", Tone.BAD),
    VerdictWord.INCONCLUSIVE: ("?", Tone.OPEN),
    VerdictWord.INVALID: ("!", Tone.BROKEN),
    VerdictWord.REFUSED: ("\N{CIRCLED DIVISION SLASH}", Tone.BROKEN),
    VerdictWord.OOM: ("\N{BLACK SQUARE}", Tone.BAD),
    VerdictWord.TIMEOUT: ("\N{RIGHTWARDS ARROW TO BAR}", Tone.BAD),
    VerdictWord.FAILED: ("\N{MULTIPLICATION SIGN}", Tone.BROKEN),
}
"""Sign and tone of each verdict."""

ABSENT = Cell(text=wording.NOTHING)

STATISTICS = (
    "median", "by median step", "slow steps", "place", "p, flip", "p, differs", "p, same", "sd", "blocks",
)  # fmt: skip
"""Headings of the numbers behind effect and interval."""


def _cell(text: str, **numbers: float) -> Cell:
    return Cell(text=text, numbers=numbers)


def word(variant: VariantVerdict) -> Cell:
    """Return the verdict with its cause, if that is something else than the numbers."""
    sign, tone = WORDS[variant.verdict]
    where = () if variant.nodes is None else (variant.nodes.in_words(),)
    causes = () if variant.cause in (None, Cause.NOT_PROVED) else (str(variant.cause),)
    alone = () if variant.measured is variant.verdict else (f"samples say {variant.measured.value}",)
    lone = () if variant.no_baseline is None else ("no baseline",)
    return Cell(text=variant.verdict.value, sign=sign, tone=tone, note="; ".join((*where, *causes, *alone, *lone)))


def effect(comparison: Comparison) -> Cell:
    """Return the change in percent."""
    return _cell(wording.percent(comparison.delta_pct), effect_pct=comparison.delta_pct)


def interval(comparison: Comparison) -> Cell:
    """Return the interval of the change."""
    low, high = comparison.ci_low_pct, comparison.ci_high_pct
    return _cell(wording.interval(low, high), ci_low_pct=low, ci_high_pct=high)


def exact_effect(exact: ExactComparison | None) -> Cell:
    """Return the change, or its range over the seeds."""
    changes = sorted({pair.change_pct for pair in exact.seeds if pair.change_pct is not None}) if exact else []
    if not changes:
        return ABSENT
    text = wording.percent(changes[0]) if len(changes) == 1 else wording.interval(changes[0], changes[-1])
    return _cell(text, **{"effect_pct": changes[0]} if len(changes) == 1 else {})


def repeats(exact: ExactComparison | None) -> Cell:
    """Return whether the repeats agree, and whether every seed was repeated."""
    if exact is None:
        return ABSENT
    if exact.problems:
        return Cell(text="differ", tone=Tone.BAD)
    if exact.unrepeated:
        return Cell(text="not of every seed" if exact.seeds else "none")
    return Cell(text="agree", tone=Tone.GOOD)


def values(exact: ExactComparison | None) -> tuple[Cell, Cell]:
    """Return the distinct values of the baseline and of the variant."""
    if exact is None or not exact.seeds:
        return ABSENT, ABSENT
    every = [*(pair.baseline for pair in exact.seeds), *(pair.variant for pair in exact.seeds)]
    shown, half = wording.quantities(exact.metric, every), len(exact.seeds)
    return Cell(text=_each_once(shown[:half])), Cell(text=_each_once(shown[half:]))


def _each_once(shown: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(shown))


def detectable(comparison: Comparison | None) -> Cell:
    """Return the minimum detectable effect."""
    return ABSENT if comparison is None else _cell(wording.size_percent(comparison.mde_pct), mde_pct=comparison.mde_pct)


def statistics(comparison: Comparison) -> tuple[Cell, ...]:
    """Return the numbers behind effect and interval, in the order of `STATISTICS`."""
    by_median, slow = comparison.by_median_pct, comparison.outlier_steps
    return (
        _cell(wording.percent(comparison.median_pct), median_pct=comparison.median_pct),
        ABSENT if by_median is None else _cell(wording.percent(by_median), by_median_pct=by_median),
        ABSENT if slow is None else Cell(text=f"{slow[1]} against {slow[0]}"),
        _cell(wording.percent(comparison.place_pct), place_pct=comparison.place_pct),
        _cell(wording.number(comparison.p_sign_flip, 3), p_sign_flip=comparison.p_sign_flip),
        _cell(wording.number(comparison.p_holm, 3), p_holm=comparison.p_holm),
        _cell(wording.number(comparison.p_same, 3), p_same=comparison.p_same),
        _cell(wording.size_percent(comparison.sd_pct), sd_pct=comparison.sd_pct),
        _cell(f"{comparison.blocks:,}", blocks=comparison.blocks),
    )


def memory(verdict: Verdict, arm: str) -> Cell:
    """Return the change of the arm's peak memory in tensors."""
    own, base = (verdict.arms[name].peak_allocated_bytes for name in (arm, verdict.baseline))
    if own is None or base is None:
        return ABSENT
    return _cell(wording.bytes_change(own - base), memory_delta_mib=(own - base) / 2**20)


def requires_loss(verdict: Verdict) -> bool:
    """Return whether the rule has a requirement on the loss."""
    return any(requirement["metric"].startswith("loss") for requirement in verdict.rule["require"])


def loss(verdict: Verdict, judged: Sequence[RequirementResult]) -> Cell:
    """Return whether the requirements on the loss hold; nothing for a variant without statistics."""
    if not requires_loss(verdict):
        return Cell(text="not asked")
    results = [result for result in judged if result.metric.startswith("loss")]
    broken = [result.metric for result in results if not result.passed and not result.undecided]
    undecided = [result.metric for result in results if result.undecided]
    if not results:
        return ABSENT
    if broken:
        return Cell(text=f"FAILED: {', '.join(broken)}", tone=Tone.BAD)
    if undecided:
        return Cell(text=f"not proved: {', '.join(undecided)}", tone=Tone.OPEN)
    compared = any(result.compared for result in results)
    return Cell(text="ok", tone=Tone.GOOD) if compared else Cell(text="not compared")


def requirement(result: RequirementResult) -> tuple[Cell, ...]:
    """Return metric, rule, result and detail."""
    cell = Cell(text="passed", tone=Tone.GOOD) if result.passed else Cell(text="FAILED", tone=Tone.BAD)
    if result.undecided:
        cell = Cell(text="not proved", tone=Tone.OPEN)
    if not result.compared and result.passed:
        cell = Cell(text="not compared")
    return row(result.metric, result.rule, cell, wording.with_minus(result.detail))
