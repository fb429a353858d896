"""The exact comparison: metrics that have no noise decide by their values, without a test and without calibration.

That a metric has no noise is not assumed: every arm runs again with every seed, and each repeat must give the same
value, bit for bit. Where one does not, the word is `inconclusive`, and the values are named.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from experiments.analysis.evidence import Evidence, Pair
from experiments.analysis.verdicts import ExactComparison, ExactPair
from experiments.block_numbers import block_list
from experiments.design.metrics import METRICS
from experiments.design.spec import Primary
from experiments.outcomes import Decision, VerdictWord
from experiments.records.receipts import Receipt, read_metric


def compare_exactly(metric: str, evidence: Evidence) -> ExactComparison | None:
    """Compare a variant with the baseline on `metric`; None where a trial lacks the value: missing data fails."""
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
        seeds=tuple(_exact_pair(metric, seed, by_seed[seed]) for seed, found in problems.items() if not found),
        problems=tuple(problem for found in problems.values() for problem in found),
        unrepeated=tuple(sorted(set(by_seed) - set(repeated))),
    )


@dataclass(frozen=True, kw_only=True)
class ExactFinding:
    """What the values of one variant say by the rule."""

    comparison: ExactComparison
    word: VerdictWord
    reason: str
    decision: Decision
    """Where every requirement is met."""
    notes: tuple[str, ...]


def judge_exactly(evidence: Evidence, primary: Primary) -> ExactFinding | None:
    """Compare a variant with the baseline on the exact metric of `primary` and find the word.

    All seeds must say the same. A metric without a direction (a loss) answers whether it is identical: `same` when it
    is, bit for bit, and `worse` when it is not. None where a trial lacks the value: missing data fails.
    """
    found = compare_exactly(primary.metric, evidence)
    if found is None:
        return None
    word, reason = _finding(found, primary)
    short = word is VerdictWord.BETTER and min(found.gains_pct) < primary.threshold_pct
    below = f"below the {primary.threshold_pct:g} % from which the rule adopts"
    return ExactFinding(
        comparison=found,
        word=word,
        reason=reason,
        decision=Decision.REJECT if short else _DECISIONS[word],
        notes=(f"better by {min(found.gains_pct):.2f} %, {below}",) if short else (),
    )


def _finding(found: ExactComparison, primary: Primary) -> tuple[VerdictWord, str]:
    if found.problems:
        return VerdictWord.INCONCLUSIVE, not_exact(found)
    if found.unrepeated:
        return VerdictWord.INCONCLUSIVE, f"nothing was repeated with seed {found.unrepeated[0]}"
    if METRICS[found.metric].better is None:
        return _identity(found)
    words = {_word_of(gain, primary.margin) for gain in found.gains_pct}
    if len(words) > 1:
        return VerdictWord.INCONCLUSIVE, f"{describe_exactly(found)}: the seeds do not agree"
    (word,) = words
    return word, f"{describe_exactly(found)}{_WHY[word].format(margin=primary.margin)}"


def not_exact(found: ExactComparison) -> str:
    """Say which repeats differ."""
    return f"{_label(found)} is not exact here: {'; '.join(found.problems)}"


def describe_exactly(found: ExactComparison) -> str:
    """Write the comparison in one phrase, for example "peak_allocated_gib -6.88 % (0.08542 -> 0.07954 GiB)"."""
    unit = METRICS[found.metric].unit
    changes = dict.fromkeys(f"{_percent(p)} ({p.baseline:.6g} -> {p.variant:.6g} {unit})" for p in found.seeds)
    return f"{found.metric} {', '.join(changes)}, the same at every repeat over {found.blocks} blocks"


_DECISIONS = {
    VerdictWord.BETTER: Decision.ADOPT,
    VerdictWord.SAME: Decision.SAME,
    VerdictWord.WORSE: Decision.REJECT,
    VerdictWord.INCONCLUSIVE: Decision.INCONCLUSIVE,
}
_WHY = {
    VerdictWord.BETTER: ": beyond the margin of {margin:g} % for the better",
    VerdictWord.WORSE: ": beyond the margin of {margin:g} % for the worse",
    VerdictWord.SAME: ": within the margin of {margin:g} %",
}


def _values(metric: str, pair: Pair) -> tuple[float | None, float | None]:
    return read_metric(METRICS[metric], pair.baseline), read_metric(METRICS[metric], pair.variant)


def _problems(metric: str, seed: int, pairs: Sequence[Pair]) -> Iterator[str]:
    """Say where the repeats of one seed show that the metric is not exact."""
    for receipts in ([pair.baseline for pair in pairs], [pair.variant for pair in pairs]):
        yield from _differing(metric, seed, receipts)


def _differing(metric: str, seed: int, receipts: Sequence[Receipt]) -> Iterator[str]:
    blocks: dict[float, list[int]] = {}
    for receipt in receipts:
        blocks.setdefault(float(read_metric(METRICS[metric], receipt) or 0), []).append(receipt.ids.block_index)
    if len(blocks) > 1:
        unit = METRICS[metric].unit
        shown = _told_apart(list(blocks)[:3])
        values = ", ".join(f"{shown[value]} {unit} (block {block_list(blocks[value])})" for value in shown)
        yield f"arm '{receipts[0].arm}' with seed {seed} gave {len(blocks)} values: {values}"


def _told_apart(values: Sequence[float]) -> dict[float, str]:
    """Write values with six digits, or with as many more as it takes to tell them apart."""
    shown = ({value: f"{value:.{digits}g}" for value in values} for digits in range(6, 18))
    return next(found for found in shown if len(set(found.values())) == len(found))


def _exact_pair(metric: str, seed: int, pairs: Sequence[Pair]) -> ExactPair:
    baseline, variant = _values(metric, pairs[0])
    return ExactPair(seed=seed, repeats=len(pairs), baseline=float(baseline or 0), variant=float(variant or 0))


def _word_of(gain_pct: float, margin_pct: float) -> VerdictWord:
    if abs(gain_pct) <= margin_pct:
        return VerdictWord.SAME
    return VerdictWord.BETTER if gain_pct > 0 else VerdictWord.WORSE


def _identity(found: ExactComparison) -> tuple[VerdictWord, str]:
    other = [pair for pair in found.seeds if pair.change]
    if not other:
        return VerdictWord.SAME, f"{_label(found)} is bit-identical over {found.blocks} blocks"
    first = other[0]
    values = f"{first.baseline!r} -> {first.variant!r} with seed {first.seed}"
    return VerdictWord.WORSE, f"{_label(found)} is not bit-identical: {values}, the same at every repeat"


def _label(found: ExactComparison) -> str:
    return METRICS[found.metric].label


def _percent(pair: ExactPair) -> str:
    return "from 0" if pair.change_pct is None else f"{pair.change_pct:+.2f} %"
