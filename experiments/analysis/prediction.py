"""Prediction: the chance that more blocks give an answer, given what the blocks so far say.

The effect and the noise are drawn as the samples leave them uncertain (Student's t around the estimate, a scaled
inverse chi-square for the variance; flat priors), then the blocks to come, then the same tests.
"""

from dataclasses import dataclass

import numpy as np
import scipy

from experiments.analysis.statistics import Array, log_ratio
from experiments.analysis.verdicts import Comparison

SIZES = (6, 8, 10, 14, 20, 28, 40, 60, 80, 120, 200, 400, 800, 2000)
"""Numbers of blocks that are asked about."""
ENOUGH = 0.8
"""Chance from which a number of blocks is recommended."""
DRAWS = 4000


@dataclass(frozen=True, kw_only=True)
class Known:
    """What the blocks so far say about one variant, in natural log units."""

    mean: float
    sd: float
    blocks: int


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What an answer takes: the two-sided level of one variant's tests after correction, and the margin."""

    level: float
    margin_pct: float


def known_of(found: Comparison) -> Known | None:
    """Return what a comparison says; None without any spread."""
    known = Known(mean=log_ratio(found.delta_pct), sd=found.sd_pct * found.widened / 100, blocks=found.blocks)
    return known if known.sd > 0 else None


def chances_of(found: Comparison, *, level: float, margin_pct: float) -> dict[int, float]:
    """Return the chance that a fresh ablation of so many blocks answers, up to the first with `ENOUGH`."""
    known = known_of(found)
    return {} if known is None else chances(known, Asked(level=level, margin_pct=margin_pct))


def chances(known: Known, asked: Asked) -> dict[int, float]:
    """Return the chance that a fresh ablation of so many blocks answers, up to the first with `ENOUGH`."""
    found: dict[int, float] = {}
    mean, sd, rng = _uncertain(known)
    for size in SIZES:
        found[size] = round(_answered(*_sampled(mean, sd, size, rng), size, asked), 3)
        if found[size] >= ENOUGH:
            break
    return found


def chance_with_more(known: Known, asked: Asked, more: int) -> float:
    """Return the chance that the blocks so far and `more` together answer."""
    mean, sd, rng = _uncertain(known)
    fresh = rng.normal(mean, sd / np.sqrt(more))
    total, freedom = known.blocks + more, known.blocks - 2
    joined = (known.blocks * known.mean + more * fresh) / total
    between = known.blocks * more / total * (fresh - known.mean) ** 2
    squares = freedom * known.sd**2 + sd**2 * rng.chisquare(max(more - 1, 1), DRAWS) * (more > 1) + between
    return _answered(joined, np.sqrt(squares / (total - 2)), total, asked)


def _uncertain(known: Known) -> tuple[Array, Array, np.random.Generator]:
    rng = np.random.default_rng(0)
    freedom = known.blocks - 2
    sd = known.sd * np.sqrt(freedom / rng.chisquare(freedom, DRAWS))
    return rng.normal(known.mean, sd / np.sqrt(known.blocks)), sd, rng


def _sampled(mean: Array, sd: Array, size: int, rng: np.random.Generator) -> tuple[Array, Array]:
    estimate = rng.normal(mean, sd / np.sqrt(size))
    return estimate, sd * np.sqrt(rng.chisquare(size - 2, DRAWS) / (size - 2))


def _answered(mean: Array, sd: Array, size: int, asked: Asked) -> float:
    se = sd / np.sqrt(size)
    low, high = log_ratio(-asked.margin_pct), log_ratio(asked.margin_pct)
    beyond = (mean < low) | (mean > high)
    different = np.abs(mean) > scipy.special.stdtrit(size - 2, 1 - asked.level / 2) * se
    same = np.minimum(mean - low, high - mean) > scipy.special.stdtrit(size - 2, 1 - asked.level) * se
    return float(np.mean((different & beyond) | same))
