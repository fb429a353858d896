"""Checks of a sample before a verdict: stalls, spreads of the two arms that differ, and noise that nobody measured.

If both arms have the same noise, even skewed noise, d is symmetric and the t test keeps its level. If only one arm has
rare slow trials, a few blocks may contain none of them. No test of a mean is then valid, so there is no verdict.
"""

from collections.abc import Sequence

import numpy as np
import scipy
from numpy.typing import NDArray

from ablate.experiments.analysis.comparing import Sample, Window
from ablate.experiments.analysis.statistics import Array, count_flip_p, fit, percent, sign_flip_p
from ablate.experiments.analysis.verdicts import Comparison
from ablate.experiments.records.calibration import Calibration

STALL_LEVEL = 0.05
"""Level of both tests, so that noisy nodes do not lose verdicts by chance."""


def stalls_differ(sample: Sample, margin_pct: float) -> str | None:
    """Return the numbers that show that the arms' stalls differ, or None.

    They differ if the effects by total and by median are further apart than the margin and block noise (t test over
    blocks), or if one arm has more outlier steps (sign-flip test over blocks).
    """
    window = sample.window
    if window is None:
        return None
    return _estimates_differ(sample, window, margin_pct) or _counts_differ(window)


def _estimates_differ(sample: Sample, window: Window, margin_pct: float) -> str | None:
    gap = fit(np.subtract(sample.differences, window.by_median), sample.places)
    return estimates_apart(sample, margin_pct) if float(gap.p_different()) <= STALL_LEVEL else None


def estimates_apart(sample: Sample, margin_pct: float) -> str | None:
    """Return the effects by total and by median step if they are further apart than the margin, or None."""
    by_median = () if sample.window is None else sample.window.by_median
    total, median = (fit(d, sample.places).mean for d in (sample.differences, by_median))
    if abs(percent(float(total - median))) <= margin_pct:
        return None
    totals = f"{percent(float(total)):+.2f} % by total and {percent(float(median)):+.2f} % by median"
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
"""Number of blocks from which a sign-flip test is used: it needs more blocks and is robust to heavy tails."""
CLEAR = 6.0
"""Distance of the estimate from zero that no tail explains, in standard deviations of the noisier arm's trials."""
LOPSIDED = 0.783
"""Distance of mean and median that 30 % of normal samples exceed, in standard deviations over the root of their number:
the 85 % point of a normal distribution times the root of pi / 2 - 1."""


def spreads_differ(sample: Sample, *, over_seeds: bool = False) -> str | None:
    """Return the numbers that show that the arms' spreads differ, or None if they do not or it does not matter.

    Unequal spreads matter for a t test of differences only if they have a tail on one side. From `FLIPS_FROM` blocks on
    the trials show that.

    `over_seeds`: the arms of a block share the luck of its seed, which is in the spread of their trials and not in d.
    The estimate is then compared with the spread of d, which is at least that of the noisier arm's own noise.
    """
    if sample.sums is None:
        return None
    d, sums = np.asarray(sample.differences), np.asarray(sample.sums)
    p = float(p_equal_spread(d, sums))
    mean = fit(d, sample.places).mean
    clear = abs(float(mean)) > CLEAR * float(np.std(d, ddof=1)) if over_seeds else bool(is_clear(d, sums, mean))
    if p > SPREAD_LEVEL or clear or not bool(may_have_a_tail(d, sums)):
        return None
    own, other = (100 * float(np.std(part, ddof=1)) for part in _arms(d, sums))
    return f"trials of the variant scatter by {own:.2g} %, of the baseline by {other:.2g} % (p {p:.2g})"


NOISE_LEVEL = 0.01
"""Level of the F test of the blocks' variance against that of the A/A blocks."""
FAR_NOISIER = 3.0
"""Ratio of the standard deviations from which A/A blocks say nothing about the noise."""


def noisier(comparison: Comparison, calibrations: Sequence[Calibration]) -> tuple[float, float] | None:
    """Return (ratio of the standard deviations, p) if d scatters more than in A/A blocks; None if not, or without any.

    Of several devices, the noisiest counts.
    """
    noisiest = max(calibrations, key=lambda one: one.sd_pct, default=None)
    if noisiest is None or noisiest.sd_pct <= 0 or comparison.baseline is not None:
        return None
    ratio = comparison.sd_pct / noisiest.sd_pct
    p = float(scipy.special.fdtrc(comparison.blocks - 2, noisiest.blocks - 2, ratio**2))
    return (ratio, p) if p <= NOISE_LEVEL else None


def noise_differs(comparison: Comparison, calibrations: Sequence[Calibration], margin_pct: float) -> str | None:
    """Say that the noise is not what the A/A blocks show, so that their autocorrelation may not hold either.

    None where the effect is further beyond the margin than any autocorrelation explains.
    """
    excess = noisier(comparison, calibrations)
    beyond = abs(comparison.delta_pct) - margin_pct
    if excess is None or excess[0] < FAR_NOISIER or beyond > CLEAR * comparison.sd_pct:
        return None
    ratio, p = excess
    of = f"{ratio:.3g} times as much as the A/A blocks (F test, p {p:.2g})"
    return f"blocks scatter by {comparison.sd_pct:.2g} %, {of}"


def is_clear(d: Array, sums: Array, mean: Array) -> NDArray[np.bool_]:
    """Return whether the tails of the noisier arm cannot explain the estimate `mean` of d.

    `d` and `sums`, ln(variant) + ln(baseline), have the blocks on their last axis.
    """
    own, other = (np.std(part, axis=-1, ddof=1) for part in _arms(d, sums))
    return np.asarray(np.abs(mean) > CLEAR * np.maximum(own, other), dtype=np.bool_)


def may_have_a_tail(d: Array, sums: Array) -> NDArray[np.bool_]:
    """Return whether the trials of the noisier arm may lie on one side of their median; few blocks do not show it."""
    own, other = _arms(d, sums)
    if d.shape[-1] < FLIPS_FROM:
        return np.ones(d.shape[:-1], dtype=np.bool_)
    noisier = np.where((np.var(own, axis=-1) > np.var(other, axis=-1))[..., None], own, other)
    away = np.abs(noisier.mean(axis=-1) - np.median(noisier, axis=-1))
    return np.asarray(away * d.shape[-1] ** 0.5 > LOPSIDED * np.std(noisier, axis=-1, ddof=1), dtype=np.bool_)


def spread_ratio(sample: Sample) -> tuple[float, float, float] | None:
    """Return the variant's standard deviation over the baseline's with its interval, if that excludes 1; else None.

    The interval is that of Pitman and Morgan for pairs (Pitman, 1939, "A note on normal correlation"), and assumes
    normal trials.
    """
    if sample.sums is None or not np.isfinite(sample.sums).all():
        return None
    own, other = _arms(np.asarray(sample.differences), np.asarray(sample.sums))
    first, second = (float(np.std(part, ddof=1)) for part in (own, other))
    if not (first > 0 and second > 0):
        return None
    blocks, shared = own.size, float(np.corrcoef(own, other)[0, 1])
    t = float(scipy.special.stdtrit(blocks - 2, 1 - SPREAD_LEVEL / 2))
    wide = 1 + 2 * (1 - min(shared**2, 1.0)) * t**2 / (blocks - 2)
    factor = (wide + (wide**2 - 1) ** 0.5) ** 0.5
    ratio = first / second
    return (ratio, ratio / factor, ratio * factor) if max(ratio, 1 / ratio) > factor else None


def _arms(d: Array, sums: Array) -> tuple[Array, Array]:
    return (sums + d) / 2, (sums - d) / 2


def p_equal_spread(d: Array, sums: Array) -> Array:
    """Return two-sided p values of equal variances in pairs: with equal variances, d and sum are uncorrelated.

    Pitman and Morgan's test, which assumes normal trials. From `FLIPS_FROM` blocks on it is the sign-flip test of the
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
