"""Traps: plausible but wrong analyses, on the same draws as ours. This module has their error rates only."""

import numpy as np
from scipy import special

from ablate.experiments.analysis.statistics import Array, fit
from tests.simulation.cases import Drawing, windows_in_parts
from tests.simulation.noise import Draw
from tests.simulation.rates import Rate, rate


def plain_t(d: Array) -> Array:
    """Return two-sided p values of the plain paired t test, (..., blocks)."""
    return fit(d, np.zeros(d.shape[-1])).p_different()


def uncorrected(drawing: Drawing, *, blocks: int, variants: int, repetitions: int) -> Rate:
    """Count ablations in which any variant is significant at 5 % without a correction."""
    parts = windows_in_parts(drawing, blocks, variants, repetitions, 0)
    return rate(np.concatenate([(plain_t(part.d) < 0.05).any(axis=1) for part in parts]))


def until_significant(drawing: Drawing, *, blocks: int, repetitions: int) -> Rate:
    """Count ablations that are significant at 5 % at any number of blocks from 4 on."""
    parts = windows_in_parts(drawing, blocks, 1, repetitions, 0)
    looks = [[plain_t(part.d[:, 0, :n]) < 0.05 for n in range(4, blocks + 1)] for part in parts]
    return rate(np.concatenate([np.any(look, axis=0) for look in looks]))


def steps_as_samples(rng: np.random.Generator, repetitions: int, *, steps: int = 25) -> Rate:
    """Count pairs of equal processes whose steps differ significantly: each process has its own speed."""
    speed = rng.normal(0, 0.004, (2, repetitions, 1))
    seconds = np.exp(speed + rng.normal(0, 0.01, (2, repetitions, steps)))
    return rate(_welch(seconds[0], seconds[1]) < 0.05)


def one_arm_after_the_other(rng: np.random.Generator, repetitions: int, *, trials: int = 8) -> Rate:
    """Count significant differences of AAAA BBBB under a drift of 1 %."""
    runs = np.linspace(0, 0.01, 2 * trials) + rng.normal(0, 0.004, (repetitions, 2 * trials))
    return rate(_welch(runs[:, :trials], runs[:, trials:]) < 0.05)


def fixed_alternation(rng: np.random.Generator, repetitions: int, *, blocks: int = 10, penalty: float = 0.005) -> Rate:
    """Count significant differences of AB AB AB where the first place of a block costs `penalty`."""
    return rate(plain_t(penalty + rng.normal(0, 0.004 * 2**0.5, (repetitions, blocks))) < 0.05)


def bootstrap_misses(drawing: Drawing, *, blocks: int, repetitions: int, studentised: bool) -> Rate:
    """Count bootstrap intervals at 95 % that miss the truth: percentile, or studentised, of 999 resamples."""
    rng = np.random.default_rng(0)
    parts = windows_in_parts(drawing, blocks, 1, repetitions, 0)
    return rate([_misses(d, rng, studentised) for part in parts for d in part.d[:, 0]])


def _misses(d: Array, rng: np.random.Generator, studentised: bool) -> bool:
    sample = d[rng.integers(0, d.size, (999, d.size))]
    means, spreads = sample.mean(axis=1), sample.std(axis=1, ddof=1)
    if not studentised:
        low, high = np.quantile(means, [0.025, 0.975])
        return not low <= 0 <= high
    pivots = (means - d.mean())[spreads > 0] / spreads[spreads > 0]
    low, high = d.mean() - np.quantile(pivots, [0.975, 0.025]) * d.std(ddof=1)
    return not low <= 0 <= high


def outlier_steps_dropped(draw: Draw, *, cutoff: float = 1.05) -> Array:
    """Return d by windows without steps slower than `cutoff` times their median, as (repetitions, blocks)."""
    kept = draw.seconds <= cutoff * np.median(draw.seconds, axis=-1, keepdims=True)
    means = np.sum(draw.seconds * kept, axis=-1) / np.count_nonzero(kept, axis=-1)
    return np.asarray(np.log(means[:, :, 0]) - np.log(means[:, :, 1]), dtype=np.float64)


def _welch(first: Array, second: Array) -> Array:
    """Return two-sided p values of Welch's t test along the last axis."""
    n = first.shape[-1]
    own, other = first.var(axis=-1, ddof=1) / n, second.var(axis=-1, ddof=1) / n
    freedom = (own + other) ** 2 / ((own**2 + other**2) / (n - 1))
    t = (first.mean(axis=-1) - second.mean(axis=-1)) / np.sqrt(own + other)
    return np.asarray(2 * special.stdtr(freedom, -np.abs(t)), dtype=np.float64)
