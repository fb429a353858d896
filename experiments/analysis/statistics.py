"""Paired statistics of d = ln(variant / baseline), one number per block, with the place in the block as a covariate.

Model: d = mean + slope * (place of the variant - place of the baseline) + noise, by least squares, with Student's t at
every number of blocks. Sameness is proved by two one-sided tests. Holm's correction runs over both kinds of p values.
The additional sign-flip test assumes d that are independent and symmetric about zero.

`fit` and `holm` take arrays with blocks or variants on the last axis, so simulations and verdicts run the same code.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from ablate.experiments.design.aa_spec import ADMITTING_BLOCKS
from ablate.experiments.design.power import FEWEST_BLOCKS
from ablate.experiments.records.calibration import AABlock, Calibration

MAX_STRENGTH = 0.9
"""With a stronger autocorrelation a few blocks are no evidence on their mean."""


RAISED_BY = 0.5
"""Standard errors, 1 / sqrt(blocks), by which the autocorrelation of few A/A blocks is raised (docs/statistics.md)."""


def dependence_of(calibrations: Iterable[Calibration]) -> float:
    """Return the strongest autocorrelation in the A/A blocks of any device; 0 without any noise in A/A blocks.

    That of fewer blocks than a calibration has is raised.
    """
    noisy = [one.samples for one in calibrations if one.sd_pct]
    return max((raised(strength(samples), len(samples)) for samples in noisy), default=0.0)


def raised(dependence: float, blocks: int) -> float:
    """Return the autocorrelation to widen by, from its estimate over so many A/A blocks."""
    if blocks >= ADMITTING_BLOCKS:
        return dependence
    return min(MAX_STRENGTH, dependence + RAISED_BY / math.sqrt(blocks))


def strength(samples: Sequence[AABlock]) -> float:
    """Return the lag-one autocorrelation of the differences of consecutive blocks of one ablation.

    It is corrected for its bias of about -(1 + 4 r) / n and kept between 0 and `MAX_STRENGTH`, so it can only widen.
    """
    d = [block.difference for block in samples]
    mean = math.fsum(d) / len(d)
    squares = math.fsum((value - mean) ** 2 for value in d)
    products = [
        (one.difference - mean) * (other.difference - mean)
        for ablation in dict.fromkeys(block.ablation for block in samples)
        for one, other in pairwise(block for block in samples if block.ablation == ablation)
    ]
    if not products or squares == 0:
        return 0.0
    return corrected(math.fsum(products) / len(products) / (squares / len(d)), len(d))


def corrected(autocorrelation: float, blocks: int) -> float:
    """Return an estimated autocorrelation without its bias, between 0 and `MAX_STRENGTH`."""
    if blocks <= 4:
        return 0.0
    return min(MAX_STRENGTH, max(0.0, (blocks * autocorrelation + 1) / (blocks - 4)))


def widening(dependence: float, blocks: int) -> float:
    """Return the factor that corrects the standard error of a mean of `blocks` dependent differences.

    The variance of their mean is `more` times that of independent differences, and their own variance is too small.
    """
    more = 1 + 2 * math.fsum((1 - lag / blocks) * dependence**lag for lag in range(1, blocks))
    return math.sqrt(more / (1 - (more - 1) / (blocks - 1)))


Array: TypeAlias = NDArray[np.float64]

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


def serial_correlation(differences: ArrayLike, places: ArrayLike) -> tuple[Array, Array]:
    """Return the lag-one autocorrelation of d around mean and place, and the one-sided p value that there is none.

    Both have the shape of `differences` (..., blocks) without its last axis. The p value uses the mean and variance
    under random order, -1 / n and (n - 2)**2 / (n**2 (n - 1)) (Wald and Wolfowitz, 1943), and a normal distribution.
    """
    d = np.asarray(differences, dtype=np.float64)
    x = np.broadcast_to(np.asarray(places, dtype=np.float64), d.shape)
    away = _around(d, x, fit(d, x).slope)
    n, squares = d.shape[-1], np.sum(away**2, axis=-1)
    r = np.sum(away[..., 1:] * away[..., :-1], axis=-1) / np.where(squares > 0, squares, 1.0)
    z = (r + 1 / n) / ((n - 2) / n / math.sqrt(n - 1))
    return r, np.asarray(scipy.special.ndtr(-z), dtype=np.float64)


SERIAL_LEVEL = 0.05
"""Level from which the autocorrelation of an ablation's own blocks widens its tests."""
SERIAL_FROM = 16
"""Blocks from which it does: fewer seldom prove a true one, and a false one costs more right verdicts than that."""


def own_dependence(differences: ArrayLike, places: ArrayLike) -> Array:
    """Return the autocorrelation of `SERIAL_FROM` blocks or more, corrected for its bias, if it is proved; else 0."""
    n = np.asarray(differences).shape[-1]
    if n < SERIAL_FROM:
        return np.zeros(np.asarray(differences).shape[:-1])
    r, p = serial_correlation(differences, places)
    strengths = [corrected(float(one) * n / (n - 1), n) for one in np.ravel(r)]
    return np.where(p <= SERIAL_LEVEL, np.reshape(strengths, r.shape), 0.0)


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
