"""Comparison of metrics without noise by their values, without a test or a calibration.

The repeats prove that there is no noise: every arm runs again with every seed, and each repeat must give the same
value, bit for bit. Otherwise the verdict is `inconclusive` and names the values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ablate.experiments.analysis.evidence import Evidence, Pair
from ablate.experiments.analysis.verdicts import ExactComparison, ExactPair
from ablate.experiments.block_numbers import block_list
from ablate.experiments.design.metrics import METRICS
from ablate.experiments.design.verdict_rule import Primary
from ablate.experiments.outcomes import Decision, VerdictWord
from ablate.experiments.records.receipts import Receipt, read_metric


@dataclass(frozen=True, kw_only=True)
class ExactResult:
    """Verdict of the values of one variant."""

    comparison: ExactComparison
    word: VerdictWord
    reason: str
    decision: Decision
    """If every requirement is met."""
    notes: tuple[str, ...]


def judge_exactly(evidence: Evidence, primary: Primary) -> ExactResult | None:
    """Return the verdict on the exact metric of `primary`; None if a trial lacks the value: missing data fails.

    All seeds must agree. A loss is `same` if it is bit-identical, and `worse` if not.
    """
    exact = _compare(primary.metric, evidence)
    if exact is None:
        return None
    word, reason = _verdict(exact, primary)
    short = word is VerdictWord.BETTER and min(exact.gains_pct) < primary.threshold_pct
    below = f"below the {primary.threshold_pct:g} % from which the rule adopts"
    return ExactResult(
        comparison=exact,
        word=word,
        reason=reason,
        decision=Decision.REJECT if short else _DECISIONS[word],
        notes=(f"better by {min(exact.gains_pct):.2f} %, {below}",) if short else (),
    )


def _compare(metric: str, evidence: Evidence) -> ExactComparison | None:
    pairs = evidence.pairs
    if not pairs or any(value is None for pair in pairs for value in _values(metric, pair)):
        return None
    by_seed: dict[int, list[Pair]] = {}
    for pair in pairs:
        by_seed.setdefault(pair.seed, []).append(pair)
    repeated = {seed: own for seed, own in sorted(by_seed.items()) if len(own) > 1}
    problems = {seed: tuple(_problems(metric, seed, own)) for seed, own in repeated.items()}
    return ExactComparison(
        metric=metric,
        blocks=len(pairs),
        seeds=tuple(_exact_pair(metric, seed, by_seed[seed]) for seed, own in problems.items() if not own),
        problems=tuple(problem for own in problems.values() for problem in own),
        unrepeated=tuple(sorted(set(by_seed) - set(repeated))),
    )


def _verdict(exact: ExactComparison, primary: Primary) -> tuple[VerdictWord, str]:
    if exact.problems:
        return VerdictWord.INCONCLUSIVE, not_exact(exact)
    if exact.unrepeated:
        return VerdictWord.INCONCLUSIVE, f"seed {exact.unrepeated[0]} was not repeated"
    if METRICS[exact.metric].kind == "loss":
        return _identity(exact)
    words = {_word_of(gain, primary.margin_pct) for gain in exact.gains_pct}
    if len(words) > 1:
        return VerdictWord.INCONCLUSIVE, f"{_describe(exact)}: the seeds do not agree"
    (word,) = words
    return word, f"{_describe(exact)}{_WHY[word].format(margin=primary.margin_pct)}"


def not_exact(exact: ExactComparison) -> str:
    """Return which repeats differ."""
    return f"{_label(exact)} is not exact here: {'; '.join(exact.problems)}"


def _describe(exact: ExactComparison) -> str:
    """Return the comparison as text, for example "peak_allocated_gib -6.88 % (0.08542 -> 0.07954 GiB)"."""
    unit = METRICS[exact.metric].unit
    changes = dict.fromkeys(f"{_percent(p)} ({p.baseline:.6g} -> {p.variant:.6g} {unit})" for p in exact.seeds)
    return f"{exact.metric} {', '.join(changes)}, the same in every repeat over {exact.blocks} blocks"


_DECISIONS = {
    VerdictWord.BETTER: Decision.ADOPT,
    VerdictWord.SAME: Decision.SAME,
    VerdictWord.WORSE: Decision.REJECT,
    VerdictWord.INCONCLUSIVE: Decision.INCONCLUSIVE,
}
_WHY = {
    VerdictWord.BETTER: ": better by more than the margin of {margin:g} %",
    VerdictWord.WORSE: ": worse by more than the margin of {margin:g} %",
    VerdictWord.SAME: ": within the margin of {margin:g} %",
}


def _values(metric: str, pair: Pair) -> tuple[float | None, float | None]:
    return read_metric(METRICS[metric], pair.baseline), read_metric(METRICS[metric], pair.variant)


def _problems(metric: str, seed: int, pairs: Sequence[Pair]) -> Iterator[str]:
    """Yield the arms whose repeats of one seed differ, with the values."""
    for receipts in ([pair.baseline for pair in pairs], [pair.variant for pair in pairs]):
        blocks: dict[float, list[int]] = {}
        for receipt in receipts:
            blocks.setdefault(_value(metric, receipt), []).append(receipt.ids.block_index)
        if len(blocks) > 1:
            unit, shown = METRICS[metric].unit, _distinct(list(blocks)[:3])
            values = ", ".join(f"{shown[value]} {unit} (block {block_list(blocks[value])})" for value in shown)
            yield f"arm '{receipts[0].arm}' with seed {seed} gave {len(blocks)} values: {values}"


def _value(metric: str, receipt: Receipt) -> float:
    return float(read_metric(METRICS[metric], receipt) or 0)


def _distinct(values: Sequence[float]) -> dict[float, str]:
    """Format values with six digits, or with as many as are needed to make them distinct."""
    shown = ({value: f"{value:.{digits}g}" for value in values} for digits in range(6, 18))
    return next(texts for texts in shown if len(set(texts.values())) == len(texts))


def _exact_pair(metric: str, seed: int, pairs: Sequence[Pair]) -> ExactPair:
    baseline, variant = _value(metric, pairs[0].baseline), _value(metric, pairs[0].variant)
    return ExactPair(seed=seed, repeats=len(pairs), baseline=baseline, variant=variant)


def _word_of(gain_pct: float, margin_pct: float) -> VerdictWord:
    if abs(gain_pct) <= margin_pct:
        return VerdictWord.SAME
    return VerdictWord.BETTER if gain_pct > 0 else VerdictWord.WORSE


def _identity(exact: ExactComparison) -> tuple[VerdictWord, str]:
    other = [pair for pair in exact.seeds if pair.change]
    if not other:
        return VerdictWord.SAME, f"{_label(exact)} is bit-identical over {exact.blocks} blocks"
    first = other[0]
    values = f"{first.baseline!r} -> {first.variant!r} with seed {first.seed}"
    return VerdictWord.WORSE, f"{_label(exact)} is not bit-identical: {values}, the same in every repeat"


def _label(exact: ExactComparison) -> str:
    return METRICS[exact.metric].label


def _percent(pair: ExactPair) -> str:
    return "from 0" if pair.change_pct is None else f"{pair.change_pct:+.2f} %"
