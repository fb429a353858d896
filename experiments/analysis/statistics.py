"""Paired statistics of d = ln(variant / baseline), one number per block, with the place in the block as a covariate.

Model: d = mean + slope * (place of the variant - place of the baseline) + noise, by least squares, with Student's t at
every number of blocks. Sameness is proved by two one-sided tests. Holm's correction runs over both kinds of p values.
The additional sign-flip test assumes d that are independent and symmetric about zero.

`fit` and `holm` take arrays with blocks or variants on the last axis, so simulations and verdicts run the same code.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from ablate.experiments.design.power import FEWEST_BLOCKS
from ablate.experiments.records.calibration import AABlock, Calibration

Array: TypeAlias = NDArray[np.float64]

STRENGTHS: Array = np.arange(91) / 100
"""Autocorrelations of neighbouring blocks; with a stronger one a few blocks are no evidence on their mean."""
LIKELY = 0.95
"""The strongest autocorrelation counts that is at least so many times as likely as the likeliest one."""
UNLIKELY = 0.15
"""Blocks show a dependence where independence is less than so many times as likely: a likelihood ratio at 5 %."""


def dependence_of(calibrations: Iterable[Calibration]) -> tuple[Array, ...]:
    """Return the log likelihood of each of `STRENGTHS` in the A/A blocks of every device; none of blocks without noise.

    Equal arms differ by nothing but the effect of their places, so a mean other than zero is evidence of dependence.
    """
    return tuple(
        np.sum([likelihood([b.difference for b in own], [b.place for b in own]) for own in _runs(one.samples)], axis=0)
        for one in calibrations
        if one.sd_pct
    )


def _runs(samples: Sequence[AABlock]) -> Iterator[list[AABlock]]:
    """Yield the blocks of each ablation: blocks of two have no neighbours in each other."""
    for ablation in dict.fromkeys(block.ablation for block in samples):
        yield [block for block in samples if block.ablation == ablation]


def likelihood(differences: ArrayLike, *covariates: ArrayLike) -> Array:
    """Return the log likelihood (..., strengths) of each of `STRENGTHS` in consecutive differences (..., blocks).

    It is that of a first-order autoregressive process, restricted (Patterson and Thompson, 1971): the effects of the
    covariates, each like the differences, and the variance are unknown.
    """
    d = np.asarray(differences, dtype=np.float64)
    away, columns = _independent(d), list[Array]()
    value, freedom = np.log1p(-(STRENGTHS**2)) / 2 + np.zeros((*d.shape[:-1], 1)), np.full(d.shape[:-1], d.shape[-1])
    for covariate in covariates:
        whole = _independent(np.broadcast_to(np.asarray(covariate, dtype=np.float64), d.shape))
        column = whole
        for earlier in columns:
            column = _without(column, earlier)
        size = np.sum(column**2, axis=-2)
        matters = size > _NOTHING * np.sum(whole**2, axis=-2)
        column = np.where(matters[..., None, :], column, 0.0)
        away, columns = _without(away, column), [*columns, column]
        value = value - np.log(np.where(matters, size, 1.0)) / 2
        freedom = freedom - matters.any(axis=-1)
    left = np.sum(away**2, axis=-2)
    varies = (left > _NOTHING * np.sum(d**2, axis=-1)[..., None]).all(axis=-1) & (freedom > 0)
    return np.where(varies[..., None], value - freedom[..., None] * np.log(np.where(left > 0, left, 1.0)) / 2, 0.0)


_NOTHING = 1e-24
"""Share of a sum of squares that rounding leaves."""


def _independent(values: Array) -> Array:
    """Return values (..., blocks, strengths) that are independent of each other if `values` have that strength."""
    series = np.broadcast_to(values[..., None], (*values.shape, STRENGTHS.size)).copy()
    series[..., 1:, :] -= STRENGTHS * values[..., :-1, None]
    series[..., 0, :] *= np.sqrt(1 - STRENGTHS**2)
    return series


def _without(values: Array, column: Array) -> Array:
    """Return `values` without their part along `column`, both (..., blocks, strengths)."""
    size = np.sum(column**2, axis=-2, keepdims=True)
    part = np.sum(values * column, axis=-2, keepdims=True) / np.where(size > 0, size, 1.0)
    return np.asarray(values - part * column, dtype=np.float64)


def strongest(in_aa: Array, own: ArrayLike = 0.0) -> Array:
    """Return the strongest of `STRENGTHS` that is still likely, by log likelihoods (..., strengths).

    `own` are those in the compared blocks themselves. They count beside the A/A blocks, and alone where they show a
    dependence, because the A/A blocks may lack it.
    """
    own = np.asarray(own, dtype=np.float64) + np.zeros(STRENGTHS.size)
    dependent = own[..., 0] < own.max(axis=-1) + math.log(UNLIKELY)
    return np.maximum(_end(in_aa + own), np.where(dependent, _end(own), 0.0))


def _end(likelihoods: Array) -> Array:
    likely = likelihoods >= likelihoods.max(axis=-1, keepdims=True) + math.log(LIKELY)
    return np.asarray(STRENGTHS[STRENGTHS.size - 1 - np.argmax(likely[..., ::-1], axis=-1)], dtype=np.float64)


def strength_of(devices: Iterable[Array], own: Sequence[Array] = ()) -> float:
    """Return the autocorrelation to widen by: that of the most dependent device; 0 without any noise in A/A blocks.

    `devices` are of `dependence_of`. `own` are the log likelihoods in the compared blocks, one a variant; they count as
    one series, because the variants share the trials of the baseline.
    """
    shown = np.mean(own, axis=0) if own else 0.0
    return max((float(strongest(one, shown)) for one in devices), default=0.0)


@lru_cache(maxsize=65_536)
def widening(dependence: float, blocks: int) -> float:
    """Return the factor that corrects the standard error of a mean of `blocks` dependent differences.

    The variance of their mean is `more` times that of independent differences, and their own variance is too small.
    """
    more = 1 + 2 * math.fsum((1 - lag / blocks) * dependence**lag for lag in range(1, blocks))
    return math.sqrt(more / (1 - (more - 1) / (blocks - 1)))


EXACT_UP_TO = 16
"""Largest number of blocks for which all sign flips are counted."""
FLIPS = 9_999
_ROWS_AT_ONCE = 100


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How differences of a metric and percent are converted."""

    percent: Callable[[float], float]
    """Difference -> change in percent."""
    natural: Callable[[float], float]
    """Change in percent -> difference."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Mean of d, corrected for places, in natural log units; arrays of the shape of d without its last axis."""

    blocks: int
    mean: Array
    se: Array
    """Standard error of the mean."""
    sd: Array
    """Standard deviation of d around the fit."""
    slope: Array
    """Effect of one place later in the block."""
    freedom: Array
    bias: float = 0.0
    """Largest error of the mean that no number of blocks makes smaller; tests and intervals allow for it."""

    def widened(self, factor: ArrayLike) -> "Fit":
        """Return the fit with a `factor` times larger standard error."""
        return replace(self, se=np.asarray(self.se * np.asarray(factor), dtype=np.float64))

    def p_different(self) -> Array:
        """Return two-sided p values of the hypothesis that the mean is zero."""
        distance = self._t(np.maximum(np.abs(self.mean) - self.bias, 0.0))
        return np.asarray(2 * scipy.special.stdtr(self.freedom, -distance), dtype=np.float64)

    def p_same(self, low: float, high: float) -> Array:
        """Return p values of two one-sided tests; small ones prove a mean between `low` and `high`."""
        above, below = self._t(self.mean - low - self.bias), self._t(high - self.mean - self.bias)
        return np.asarray(scipy.special.stdtr(self.freedom, -np.minimum(above, below)), dtype=np.float64)

    def interval(self, level: ArrayLike) -> tuple[Array, Array]:
        """Return the two-sided interval of the mean that misses it with probability `level`."""
        reach = scipy.special.stdtrit(self.freedom, 1 - np.asarray(level) / 2) * self.se + self.bias
        return self.mean - reach, self.mean + reach

    def _t(self, distance: Array) -> Array:
        """Return distances in standard errors; without spread 0 or infinite."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.se > 0, distance / self.se, np.where(distance == 0, 0.0, np.sign(distance) * np.inf))


def fit(differences: ArrayLike, places: ArrayLike) -> Fit:
    """Fit block differences (..., blocks) on the variant's place minus the baseline's, (blocks,) or (..., blocks)."""
    d = np.asarray(differences, dtype=np.float64)
    if d.ndim == 0 or d.shape[-1] < FEWEST_BLOCKS or not np.isfinite(d).all():
        raise ValueError(f"needs at least {FEWEST_BLOCKS} finite differences, got {d.tolist()}")
    x = np.broadcast_to(np.asarray(places, dtype=np.float64), d.shape)
    blocks = d.shape[-1]
    centred = x - x.mean(axis=-1, keepdims=True)
    spread: Any = np.sum(centred**2, axis=-1)
    has_slope: Any = spread > 0
    weight = np.where(has_slope, spread, 1.0)
    slope = np.sum(centred * d, axis=-1) / weight
    shift = np.where(has_slope, x.mean(axis=-1), 0.0)
    residual = _around(d, x, slope)
    freedom = np.where(has_slope, blocks - 2.0, blocks - 1.0)
    sd = np.sqrt(np.sum(residual**2, axis=-1) / freedom)
    se = sd * np.sqrt(1 / blocks + shift**2 / weight)
    return Fit(blocks=blocks, mean=d.mean(axis=-1) - slope * shift, se=se, sd=sd, slope=slope, freedom=freedom)


def _around(d: Array, x: Array, slope: Array) -> Array:
    """Return d without its mean and without `slope` times x, which is centred."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return np.asarray(d - d.mean(axis=-1, keepdims=True) - slope[..., None] * centred, dtype=np.float64)


def without_luck(estimate: ArrayLike, least: ArrayLike, se: ArrayLike) -> Array:
    """Return estimates that count only from `least` on, less the mean luck of those whose true value they are.

    That is the mean of a normal distribution cut below `least`. It leaves a part: the true values are smaller.
    """
    x, end, unit = (np.asarray(values, dtype=np.float64) for values in (estimate, least, se))
    room = (x - end) / unit
    luck = np.exp(-(room**2) / 2) / math.sqrt(2 * math.pi) / scipy.special.ndtr(room)
    return np.asarray(x - luck * unit, dtype=np.float64)


def holm(p_values: ArrayLike, family: int) -> Array:
    """Return Holm's step-down adjusted p values (..., tests), in the given order.

    `family` is the number of planned tests; tests without a p value count as p = 1.
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, axis=-1, kind="stable")
    ranked = np.take_along_axis(p, order, axis=-1) * (family - np.arange(p.shape[-1]))
    adjusted = np.empty_like(p)
    np.put_along_axis(adjusted, order, np.minimum(1.0, np.maximum.accumulate(ranked, axis=-1)), axis=-1)
    return adjusted


def sign_flip_p(differences: ArrayLike) -> Array:
    """Return two-sided sign-flip p values of the mean: exact up to 16 blocks, by 9 999 seeded flips beyond."""
    d = np.asarray(differences, dtype=np.float64)
    rows = d.reshape(-1, d.shape[-1])
    extreme = [_share_as_extreme(rows[start : start + _ROWS_AT_ONCE]) for start in range(0, len(rows), _ROWS_AT_ONCE)]
    return np.concatenate(extreme).reshape(d.shape[:-1])


def _share_as_extreme(rows: Array) -> Array:
    """Return the share of sign flips with sums at least as far from zero as those of `rows` (ablations, blocks)."""
    flipped = np.abs(rows @ _signs(rows.shape[1]))
    observed = flipped[:, 0] * (1 - 1e-12)
    return np.asarray(np.mean(flipped >= observed[:, None], axis=1), dtype=np.float64)


@lru_cache(maxsize=8)
def _signs(blocks: int) -> Array:
    """Return sign flips (blocks, flips): all with the first sign fixed, or the identity and 9 999 seeded flips."""
    if blocks <= EXACT_UP_TO:
        bits = np.arange(2 ** (blocks - 1))[None, :] >> np.arange(blocks)[:, None] & 1
        return np.asarray(1.0 - 2.0 * bits)
    drawn = np.random.default_rng(0).integers(0, 2, (blocks, FLIPS + 1))
    drawn[:, 0] = 0
    return np.asarray(1.0 - 2.0 * drawn)


def count_flip_p(differences: Iterable[int]) -> float:
    """Return the exact two-sided sign-flip p value of the sum of whole numbers, at any number of blocks."""
    values = list(differences)
    return _count_flip_p(tuple(sorted(abs(value) for value in values if value)), abs(sum(values)))


@lru_cache(maxsize=65_536)
def _count_flip_p(sizes: tuple[int, ...], observed: int) -> float:
    chances = {0: 1.0}
    for size in sizes:
        flipped: dict[int, float] = {}
        for total, chance in chances.items():
            for end in (total - size, total + size):
                flipped[end] = flipped.get(end, 0.0) + chance / 2
        chances = flipped
    return math.fsum(chance for total, chance in chances.items() if abs(total) >= observed)


MOST_APART = 1e6
"""Two numbers further apart than this factor have no ratio that statistics can use."""
_MOST_LOG = 600.0


def log_of_ratio(own: float | None, other: float | None) -> float | None:
    """Return ln(own / other); None unless both are above zero and not too far apart."""
    if own is None or other is None or not (own > 0 and other > 0):
        return None
    ratio = own / other
    return math.log(ratio) if 1 / MOST_APART < ratio < MOST_APART else None


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of at least one number. A program may report numbers whose sum is no float."""
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        return math.fsum(value / len(values) for value in values)


def percent(log_ratio: float) -> float:
    """Return a log ratio as percent change, cut where a float or a document ends."""
    return 100 * math.expm1(min(log_ratio, _MOST_LOG))


def log_ratio(change_pct: float) -> float:
    """Return a percent change as log ratio; a rounded -100 % is the largest loss that a float can tell from it."""
    return math.log1p(max(change_pct / 100, -1 + 2**-53))


RATIO = Scale(percent=percent, natural=log_ratio)
"""Differences are ln(variant / baseline)."""
SHARE = Scale(percent=lambda share: 100 * share, natural=lambda change_pct: change_pct / 100)
"""Differences are shares of the baseline's mean."""
