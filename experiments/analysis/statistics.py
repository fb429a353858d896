"""Paired statistics of d = ln(variant / baseline), one number per block.

The interval is Student's t below 20 blocks, where resampling undercovers, a studentised bootstrap from 20 to 200, and
t again where the two agree. The sign-flip test asks nothing of the distribution; Holm's correction runs over paired
t p values, because with six blocks a corrected sign-flip p could never fall below 5 %.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array: TypeAlias = NDArray[np.float64]

BOOTSTRAP_FROM, BOOTSTRAP_UP_TO = 20, 200
"""Numbers of blocks between which the interval is a bootstrap; beyond, it and Student's t agree."""
RESAMPLES = 4999
EXACT_UP_TO = 16
"""Blocks up to which all sign flips are counted."""
FLIPS = 9_999
_ROWS_AT_ONCE = 500


@dataclass(frozen=True, kw_only=True)
class Paired:
    """What the blocks say about one variant and one metric, in natural log units."""

    blocks: int
    mean: float
    median: float
    sd: float
    ci95: tuple[float, float]
    ci90: tuple[float, float]
    p_sign_flip: float
    p_t: float


def paired(differences: Sequence[float]) -> Paired:
    """Return the statistics of at least two finite block differences."""
    d = np.asarray(differences, dtype=np.float64)
    if d.size < 2 or not np.isfinite(d).all():
        raise ValueError(f"needs at least two finite differences, got {list(differences)}")
    interval = _interval_function(d)
    return Paired(
        blocks=d.size,
        mean=float(d.mean()),
        median=float(np.median(d)),
        sd=float(d.std(ddof=1)),
        ci95=interval(0.95),
        ci90=interval(0.90),
        p_sign_flip=sign_flip_p(d),
        p_t=t_p(d),
    )


def _interval_function(d: Array) -> "_Interval":
    resampled = BOOTSTRAP_FROM <= d.size <= BOOTSTRAP_UP_TO and d.std() > 0
    return _Interval(d, _bootstrap_t(d) if resampled else None)


class _Interval:
    """Two-sided interval of the mean at any confidence level, from one set of resamples."""

    def __init__(self, d: Array, pivots: Array | None) -> None:
        self._mean = float(d.mean())
        self._se = float(d.std(ddof=1)) / math.sqrt(d.size)
        self._freedom = d.size - 1
        self._pivots = pivots

    def __call__(self, level: float) -> tuple[float, float]:
        tail = (1 - level) / 2
        if self._pivots is None:
            reach = float(special.stdtrit(self._freedom, 1 - tail)) * self._se
            return self._mean - reach, self._mean + reach
        low, high = np.quantile(self._pivots, [tail, 1 - tail])
        return self._mean - float(high) * self._se, self._mean - float(low) * self._se


def _bootstrap_t(d: Array) -> Array:
    """Return the studentised means of seeded resamples; those without any spread say nothing and are left out."""
    rng = np.random.default_rng(0)
    pivots = []
    for start in range(0, RESAMPLES, _ROWS_AT_ONCE):
        rows = min(_ROWS_AT_ONCE, RESAMPLES - start)
        sample = d[rng.integers(0, d.size, (rows, d.size))]
        se = sample.std(axis=1, ddof=1) / math.sqrt(d.size)
        spread = se > 0
        pivots.append((sample.mean(axis=1)[spread] - d.mean()) / se[spread])
    return np.concatenate(pivots)


def sign_flip_p(differences: Sequence[float] | Array) -> float:
    """Return the two-sided sign-flip p value of the mean: exact up to 16 blocks, 9 999 seeded flips beyond."""
    d = np.abs(np.asarray(differences, dtype=np.float64))
    observed = abs(float(np.sum(differences))) * (1 - 1e-12)
    if d.size <= EXACT_UP_TO:
        return float(np.mean(np.abs(_all_sums(d)) >= observed))
    rng = np.random.default_rng(0)
    extreme = 0
    for start in range(0, FLIPS, _ROWS_AT_ONCE):
        rows = min(_ROWS_AT_ONCE, FLIPS - start)
        bits = np.unpackbits(rng.integers(0, 256, (rows, -(-d.size // 8)), dtype=np.uint8), axis=1, count=d.size)
        extreme += int(np.count_nonzero(np.abs(2 * (bits.astype(np.float64) @ d) - d.sum()) >= observed))
    return (extreme + 1) / (FLIPS + 1)


def _all_sums(d: Array) -> Array:
    """Return the sums under all sign flips, the first sign fixed: the other half mirrors these."""
    sums = d[:1]
    for value in d[1:]:
        sums = np.concatenate((sums + value, sums - value))
    return sums


def t_p(differences: Sequence[float] | Array) -> float:
    """Return the two-sided p value of the paired t test."""
    d = np.asarray(differences, dtype=np.float64)
    se = float(d.std(ddof=1)) / math.sqrt(d.size)
    if se == 0:
        return 1.0 if d.mean() == 0 else 0.0
    return float(2 * special.stdtr(d.size - 1, -abs(float(d.mean()) / se)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's step-down adjusted p values, in the order given."""
    ranked = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [1.0] * len(p_values)
    running = 0.0
    for rank, index in enumerate(ranked):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def percent(log_ratio: float) -> float:
    """Return a log ratio as percent change."""
    return 100 * math.expm1(log_ratio)
