"""Spreads: whether one arm's trials scatter more than the other's, so that the mean of d may be far from its samples.

Where both arms have the same noise, however skewed, d is symmetric and the t test holds. Where one arm has rare slow
trials of its own, a few blocks may hold none of them: then no test of a mean is right, and no word is said.
"""

import numpy as np
import scipy
from numpy.typing import NDArray

from experiments.analysis.comparing import Sample, Window
from experiments.analysis.statistics import Array, count_flip_p, fit, percent, sign_flip_p

STALL_LEVEL = 0.05
"""Of both tests: chance alone must not take words from noisy nodes."""


def stalls_differ(sample: Sample, margin_pct: float) -> str | None:
    """Return how the arms' stalls differ, with the numbers, or None.

    They do where effects by total and by median are further apart than the margin, beyond what block noise explains
    (t test over blocks), or where one arm has more outlier steps (sign-flip test over blocks).
    """
    window = sample.window
    if window is None:
        return None
    return _estimates_differ(sample, window, margin_pct) or _counts_differ(window)


def _estimates_differ(sample: Sample, window: Window, margin_pct: float) -> str | None:
    by_total, by_median = (fit(d, sample.places).mean for d in (sample.differences, window.by_median))
    gap = fit(np.subtract(sample.differences, window.by_median), sample.places)
    if abs(percent(float(gap.mean))) <= margin_pct or float(gap.p_different()) > STALL_LEVEL:
        return None
    totals = f"{percent(float(by_total)):+.2f} % by total and {percent(float(by_median)):+.2f} % by median"
    return f"{totals}, further apart than the margin of {margin_pct:g} %"


def _counts_differ(window: Window) -> str | None:
    more = [variant - baseline for baseline, variant in window.outliers]
    p = count_flip_p(more)
    if p > STALL_LEVEL:
        return None
    own, other = sum(variant for _, variant in window.outliers), sum(baseline for baseline, _ in window.outliers)
    return f"{own} outlier steps against the baseline's {other} (sign-flip p {p:.2g})"


SPREAD_LEVEL = 0.05
FLIPS_FROM = 16
"""Blocks from which a sign-flip test takes over: it needs more blocks to see, and heavy tails do not fool it."""
CLEAR = 6.0
"""Distance of the estimate from zero, in standard deviations of the noisier arm's trials, that no tail explains."""


def spreads_differ(sample: Sample) -> str | None:
    """Return how the arms' spreads differ, with the numbers, or None where they do not or it does not matter."""
    if sample.sums is None:
        return None
    d, sums = np.asarray(sample.differences), np.asarray(sample.sums)
    p = float(p_equal_spread(d, sums))
    if p > SPREAD_LEVEL or bool(is_clear(d, sums, fit(d, sample.places).mean)):
        return None
    own, other = (100 * float(np.std(part, ddof=1)) for part in _arms(d, sums))
    return f"trials of the variant scatter by {own:.2g} %, of the baseline by {other:.2g} % (p {p:.2g})"


def is_clear(d: Array, sums: Array, mean: Array) -> NDArray[np.bool_]:
    """Return where the estimate `mean` of d lies beyond what the tails of the noisier arm explain.

    Blocks lie along the last axis of `d` and of `sums`, which is ln(variant) + ln(baseline) of every block.
    """
    own, other = (np.std(part, axis=-1, ddof=1) for part in _arms(d, sums))
    return np.asarray(np.abs(mean) > CLEAR * np.maximum(own, other), dtype=np.bool_)


def _arms(d: Array, sums: Array) -> tuple[Array, Array]:
    return (sums + d) / 2, (sums - d) / 2


def p_equal_spread(d: Array, sums: Array) -> Array:
    """Return two-sided p values of equal variances in pairs: arms of equal variance make d and sum uncorrelated.

    Pitman and Morgan's test, which takes the trials to be normal; from `FLIPS_FROM` blocks on the sign-flip test of the
    same products, the squares of the variant minus those of the baseline, around the medians of the arms.
    """
    if d.shape[-1] >= FLIPS_FROM:
        own, other = (part - np.median(part, axis=-1, keepdims=True) for part in _arms(d, sums))
        return sign_flip_p(own**2 - other**2)
    first, second = (values - values.mean(axis=-1, keepdims=True) for values in (d, sums))
    scale = np.sqrt((first**2).sum(axis=-1) * (second**2).sum(axis=-1))
    share = (first * second).sum(axis=-1) / np.where(scale > 0, scale, 1.0)
    freedom = d.shape[-1] - 2
    t = share * np.sqrt(freedom / np.maximum(1 - share**2, 1e-15))
    return np.asarray(2 * scipy.special.stdtr(freedom, -np.abs(t)), dtype=np.float64)
