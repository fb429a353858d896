"""The variants of an ablation against each other: estimates for exploration, which no verdict uses."""

import math
from itertools import combinations

from ablate.experiments.analysis.verdicts import Comparison, VariantVerdict, Verdict
from ablate.experiments.outcomes import Outcome
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.table import Cell, Table, numbers, row, texts
from ablate.experiments.reporting.verdict_layout import lay_out

MOST_VARIANTS = 6
LEVEL = 0.05
"""Two-sided, of each interval alone."""
FEWEST_BLOCKS = 3


def between_variants(verdict: Verdict) -> Table:
    """Return each pair of variants that were measured in every block, the best ones; no rows for a single variant."""
    judged = {one.arm: one for one in verdict.variants}
    variants = [judged[one.arm] for one in lay_out(verdict).variants]
    able = [(one.arm, one.primary) for one in variants if one.primary and _measured_in_every_block(verdict, one)]
    metric = verdict.rule["primary"]["metric"]
    shown = able[:MOST_VARIANTS]
    left = len(able) - len(shown)
    return Table(
        title="Variants against each other: exploratory",
        columns=(
            *texts("variant", "against"),
            *numbers(f"difference of {wording.metric(metric)}", "95 % interval", "blocks"),
        ),
        rows=tuple(_row(one, other) for one, other in combinations(shown, 2)),
        note="Not planned and not judged: no decision follows. Block by block, the difference of one from the "
        "baseline less that of the other. Student's t for each pair alone, without a correction for the number of "
        "pairs. To judge a pair, make one of them the baseline of a new ablation."
        + (f" Only the first {MOST_VARIANTS} of {len(able)} variants." if left else ""),
    )


def _measured_in_every_block(verdict: Verdict, variant: VariantVerdict) -> bool:
    """Return whether no block lacks the baseline or the variant, so that equal places are equal blocks.

    Metrics of curves have an error that both variants need not share, so they are left out.
    """
    every = {Outcome.MEASURED.value: verdict.blocks_counted}
    arms = (verdict.arms[variant.arm], verdict.arms[verdict.baseline])
    compared = variant.primary is not None and len(variant.primary.differences_pct) >= FEWEST_BLOCKS
    alike = variant.other_work is None and (variant.primary is None or variant.primary.bias_pct is None)
    return compared and alike and all(dict(arm.outcomes) == every for arm in arms)


def _row(one: tuple[str, Comparison], other: tuple[str, Comparison]) -> tuple[Cell, ...]:
    mean, low, high = difference(one[1], other[1])
    return row(
        one[0],
        other[0],
        Cell(text=wording.percent(mean), numbers={"difference_pct": mean}),
        Cell(text=wording.interval(low, high), numbers={"low_pct": low, "high_pct": high}),
        f"{len(one[1].differences_pct):,}",
    )


def difference(one: Comparison, other: Comparison) -> tuple[float, float, float]:
    """Return the difference of two variants in percent, and the ends of its interval.

    Of a loss, in percent of the baseline's mean; of other metrics, in percent of the second variant.
    """
    is_loss = one.baseline is not None
    pairs = zip(one.differences_pct, other.differences_pct, strict=True)
    apart = [a - b if is_loss else math.log1p(a / 100) - math.log1p(b / 100) for a, b in pairs]
    count = len(apart)
    mean = math.fsum(apart) / count
    error = math.sqrt(math.fsum((each - mean) ** 2 for each in apart) / (count - 1) / count)
    half = quantile(count - 1) * error * max(one.widened, other.widened)
    ends = (mean, mean - half, mean + half)
    if is_loss:
        return ends
    center, low, high = (100 * math.expm1(end) for end in ends)
    return center, low, high


def quantile(degrees: int) -> float:
    """Return Student's t quantile of a two-sided interval of one pair."""
    from scipy.special import stdtrit  # most commands do not need scipy

    return float(stdtrit(degrees, 1 - LEVEL / 2))
