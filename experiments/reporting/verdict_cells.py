"""The cells of a verdict's tables: how one word, effect, interval, memory or requirement is written."""

from collections.abc import Sequence

from experiments.analysis.verdicts import Cause, Comparison, ExactComparison, RequirementResult, VariantVerdict, Verdict
from experiments.outcomes import VerdictWord
from experiments.reporting import wording
from experiments.reporting.table import Cell, Tone, row

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
"""Sign and tone of every word."""

ABSENT = Cell(text=wording.NOTHING)

STATISTICS = (
    "median", "by median step", "slow steps", "place", "p, flip", "p, differs", "p, same", "sd", "blocks",
)  # fmt: skip
"""Headings of the numbers behind effect and interval."""


def _cell(text: str, **numbers: float) -> Cell:
    return Cell(text=text, numbers=numbers)


def word(variant: VariantVerdict) -> Cell:
    """Return the word; what is inconclusive for another reason than its numbers says so."""
    sign, tone = WORDS[variant.verdict]
    causes = () if variant.cause in (None, Cause.NOT_PROVED) else (str(variant.cause),)
    alone = () if variant.measured is variant.verdict else (f"samples say {variant.measured.value}",)
    lone = () if variant.no_baseline is None else ("no baseline",)
    return Cell(text=variant.verdict.value, sign=sign, tone=tone, note="; ".join((*causes, *alone, *lone)))


def effect(found: Comparison) -> Cell:
    """Return the change in percent."""
    return _cell(wording.percent(found.delta_pct), effect_pct=found.delta_pct)


def interval(found: Comparison) -> Cell:
    """Return the interval of the change."""
    low, high = found.ci_low_pct, found.ci_high_pct
    return _cell(wording.interval(low, high), ci_low_pct=low, ci_high_pct=high)


def exact_effect(found: ExactComparison | None) -> Cell:
    """Return the change, or its range over the seeds."""
    changes = sorted({pair.change_pct for pair in found.seeds if pair.change_pct is not None}) if found else []
    if not changes:
        return ABSENT
    text = wording.percent(changes[0]) if len(changes) == 1 else wording.interval(changes[0], changes[-1])
    return _cell(text, **{"effect_pct": changes[0]} if len(changes) == 1 else {})


def repeats(found: ExactComparison | None) -> Cell:
    """Return whether every repeat gave the same value, and whether every seed had one."""
    if found is None:
        return ABSENT
    if found.problems:
        return Cell(text="differ", tone=Tone.BAD)
    if found.unrepeated:
        return Cell(text="not of every seed" if found.seeds else "none")
    return Cell(text="agree", tone=Tone.GOOD)


def values(found: ExactComparison | None) -> tuple[Cell, Cell]:
    """Return the baseline's and the variant's values, each once."""
    if found is None or not found.seeds:
        return ABSENT, ABSENT
    every = [*(pair.baseline for pair in found.seeds), *(pair.variant for pair in found.seeds)]
    shown, half = wording.quantities(found.metric, every), len(found.seeds)
    return Cell(text=_each_once(shown[:half])), Cell(text=_each_once(shown[half:]))


def _each_once(shown: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(shown))


def detectable(found: Comparison | None) -> Cell:
    """Return the smallest effect that would have been found."""
    return ABSENT if found is None else _cell(wording.size_percent(found.mde_pct), mde_pct=found.mde_pct)


def statistics(found: Comparison) -> tuple[Cell, ...]:
    """Return what stands behind effect and interval, in the order of `STATISTICS`."""
    by_median, slow = found.by_median_pct, found.outlier_steps
    return (
        _cell(wording.percent(found.median_pct), median_pct=found.median_pct),
        ABSENT if by_median is None else _cell(wording.percent(by_median), by_median_pct=by_median),
        ABSENT if slow is None else Cell(text=f"{slow[1]} against {slow[0]}"),
        _cell(wording.percent(found.place_pct), place_pct=found.place_pct),
        _cell(wording.number(found.p_sign_flip, 3), p_sign_flip=found.p_sign_flip),
        _cell(wording.number(found.p_holm, 3), p_holm=found.p_holm),
        _cell(wording.number(found.p_same, 3), p_same=found.p_same),
        _cell(wording.size_percent(found.sd_pct), sd_pct=found.sd_pct),
        _cell(f"{found.blocks:,}", blocks=found.blocks),
    )


def memory(verdict: Verdict, arm: str) -> Cell:
    """Return the change of the arm's peak memory in tensors."""
    own, base = (verdict.arms[name].peak_allocated_bytes for name in (arm, verdict.baseline))
    if own is None or base is None:
        return ABSENT
    return _cell(wording.bytes_change(own - base), memory_delta_mib=(own - base) / 2**20)


def loss(verdict: Verdict, judged: Sequence[RequirementResult]) -> Cell:
    """Return whether the requirements on the loss hold; a variant without statistics is not held to them."""
    if not any(asked["metric"].startswith("loss") for asked in verdict.rule["require"]):
        return Cell(text="not asked")
    results = [result for result in judged if result.metric.startswith("loss")]
    broken = [result.metric for result in results if not result.passed]
    if not results:
        return ABSENT
    if broken:
        return Cell(text=f"FAILED: {', '.join(broken)}", tone=Tone.BAD)
    compared = any(result.compared for result in results)
    return Cell(text="ok", tone=Tone.GOOD) if compared else Cell(text="not compared")


def requirement(found: RequirementResult) -> tuple[Cell, ...]:
    """Return metric, rule, result and what was found."""
    result = Cell(text="passed", tone=Tone.GOOD) if found.passed else Cell(text="FAILED", tone=Tone.BAD)
    if not found.compared and found.passed:
        result = Cell(text="not compared")
    return row(found.metric, found.rule, result, wording.with_minus(found.detail))
