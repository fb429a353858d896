"""Prediction: the chance that more blocks give an answer, given the blocks so far.

Effect and noise are drawn from their posterior under flat priors: Student's t around the estimate, a scaled inverse
chi-square for the variance. The future blocks are drawn from these, and the same tests are applied.
"""

from dataclasses import dataclass

import numpy as np
import scipy

from ablate.experiments.analysis.statistics import RATIO, SHARE, Array, Scale
from ablate.experiments.analysis.verdicts import Comparison
from ablate.experiments.design.power import MAX_BLOCKS
from ablate.experiments.design.spec import MAX_SEEDS

SIZES = (6, 8, 10, 14, 20, 28, 40, 60, 80, 120, 200, 400, 800, 2000)
"""Candidate numbers of blocks."""
ENOUGH = 0.8
"""Smallest chance at which a number of blocks is recommended."""
DRAWS = 4000


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimate of one variant's effect from the blocks or seeds so far, in the units of `scale`."""

    mean: float
    sd: float
    blocks: int
    scale: Scale = RATIO


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Conditions of an answer: the two-sided level of one variant's tests after correction, and the margin."""

    level: float
    margin_pct: float


def estimate_of(comparison: Comparison) -> Estimate | None:
    """Return the estimate of a comparison; None without any spread."""
    sd = comparison.sd_pct * comparison.widened / 100
    scale = RATIO if comparison.baseline is None else SHARE
    mean = scale.natural(comparison.delta_pct)
    return Estimate(mean=mean, sd=sd, blocks=comparison.blocks, scale=scale) if sd > 0 else None


def most_blocks(comparison: Comparison) -> int:
    """Return the most blocks of an ablation of this metric: the most seeds where each block needs one."""
    own_seeds = comparison.baseline is not None or comparison.better is not None or comparison.bias_pct is not None
    return MAX_SEEDS if own_seeds else MAX_BLOCKS


def chances_of(comparison: Comparison, *, level: float, margin_pct: float) -> dict[int, float]:
    """Return by number of blocks the chance that a fresh ablation answers; empty without any spread."""
    estimate, most = estimate_of(comparison), most_blocks(comparison)
    return {} if estimate is None else chances(estimate, Conditions(level=level, margin_pct=margin_pct), most=most)


def chances(estimate: Estimate, conditions: Conditions, *, most: int = MAX_BLOCKS) -> dict[int, float]:
    """Return by number of blocks the chance that a fresh ablation answers, up to the first with `ENOUGH`."""
    by_size: dict[int, float] = {}
    mean, sd, rng = _uncertain(estimate)
    for size in (size for size in SIZES if size <= most):
        by_size[size] = round(_answered(estimate.scale, *_sampled(mean, sd, size, rng), size, conditions), 3)
        if by_size[size] >= ENOUGH:
            break
    return by_size


def chance_with_more(estimate: Estimate, conditions: Conditions, more: int) -> float:
    """Return the chance that the blocks so far and `more` together answer."""
    mean, sd, rng = _uncertain(estimate)
    fresh = rng.normal(mean, sd / np.sqrt(more))
    total, freedom = estimate.blocks + more, estimate.blocks - 2
    joined = (estimate.blocks * estimate.mean + more * fresh) / total
    between = estimate.blocks * more / total * (fresh - estimate.mean) ** 2
    squares = freedom * estimate.sd**2 + sd**2 * rng.chisquare(max(more - 1, 1), DRAWS) * (more > 1) + between
    return _answered(estimate.scale, joined, np.sqrt(squares / (total - 2)), total, conditions)


def _uncertain(estimate: Estimate) -> tuple[Array, Array, np.random.Generator]:
    """Return draws of the true mean and standard deviation, and their generator."""
    rng = np.random.default_rng(0)
    freedom = estimate.blocks - 2
    sd = estimate.sd * np.sqrt(freedom / rng.chisquare(freedom, DRAWS))
    return rng.normal(estimate.mean, sd / np.sqrt(estimate.blocks)), sd, rng


def _sampled(mean: Array, sd: Array, size: int, rng: np.random.Generator) -> tuple[Array, Array]:
    estimate = rng.normal(mean, sd / np.sqrt(size))
    return estimate, sd * np.sqrt(rng.chisquare(size - 2, DRAWS) / (size - 2))


def _answered(scale: Scale, mean: Array, sd: Array, size: int, conditions: Conditions) -> float:
    """Return the share of the draws that give an answer."""
    se = sd / np.sqrt(size)
    low, high = scale.natural(-conditions.margin_pct), scale.natural(conditions.margin_pct)
    reach = scipy.special.stdtrit(size - 2, 1 - conditions.level / 2) * se
    beyond = (mean + reach < low) | (mean - reach > high)
    same = np.minimum(mean - low, high - mean) > scipy.special.stdtrit(size - 2, 1 - conditions.level) * se
    return float(np.mean(beyond | same))
