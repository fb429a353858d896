"""Dependence between blocks: its sources, its effect on verdicts, and the effect of widening."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from scipy import signal

from ablate.experiments.analysis.statistics import Array, fit, likelihood
from ablate.experiments.design.aa_spec import ADMITTING_BLOCKS
from ablate.experiments.design.power import alpha_of
from tests.simulation.draws import places_of
from tests.simulation.rates import Rate, rate
from tests.simulation.words import widened_by

STRENGTHS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9)
BLOCKS = (4, 6, 8, 10, 16, 24)
FOUND_SD = 2.0
"""Planted effect, in standard deviations of d without dependence."""
FIRST = alpha_of(1)
_LEVEL_TRIALS = 2.7
"""Mean length of a level of the host's speed: between very short and several blocks."""

Drawing = Callable[[np.random.Generator, Array, float], Array]
"""Function from random numbers, places (repetitions, blocks, arms) and a strength to noise of the same shape, whose
standard deviation is one in a trial."""


def following_arms(rng: np.random.Generator, places: Array, share: float) -> Array:
    """Return noise of each arm with an autocorrelation of `share` from block to block, in any running order."""
    return np.swapaxes(_autoregressive(rng.normal(size=np.swapaxes(places, 1, 2).shape), share), 1, 2)


def heavy_tails(rng: np.random.Generator, places: Array, share: float) -> Array:
    """Return the same with fresh noise of Student's t with three degrees of freedom."""
    fresh = rng.standard_t(3, np.swapaxes(places, 1, 2).shape) / 3**0.5
    return np.swapaxes(_autoregressive(fresh, share), 1, 2)


def beside_places(rng: np.random.Generator, places: Array, share: float) -> Array:
    """Return the same with normal noise, where the first trial of every block is slower by one sd of d."""
    return following_arms(rng, places, share) + np.where(places == 0, 2**0.5, 0.0)


def following_time(rng: np.random.Generator, places: Array, share: float) -> Array:
    """Return noise with an autocorrelation of `share` from trial to trial in running order."""
    return _in_order(_autoregressive(rng.normal(size=(len(places), places[0].size)), share), places)


def following_levels(rng: np.random.Generator, places: Array, _share: float) -> Array:
    """Return noise on a host that changes its speed by levels of random length."""
    shape = (len(places), places[0].size)
    changes = rng.random(shape) < 1 / _LEVEL_TRIALS
    level = np.maximum.accumulate(np.where(changes, np.arange(shape[1]), 0), axis=1)
    speeds = np.take_along_axis(rng.normal(0, 3, shape), level, axis=1)
    return _in_order(speeds + rng.normal(size=shape), places)


def drifting(rng: np.random.Generator, places: Array, share: float) -> Array:
    """Return noise of a host that gets slower by `share` standard deviations of a trial in every block."""
    shape = (len(places), places[0].size)
    return _in_order(rng.normal(size=shape) + share * np.arange(shape[1]) / places.shape[2], places)


def stepping(rng: np.random.Generator, places: Array, share: float) -> Array:
    """Return noise of a host that gets slower by `share` standard deviations of a trial, once, at a drawn trial."""
    shape = (len(places), places[0].size)
    later = np.arange(shape[1]) >= rng.integers(0, shape[1], (shape[0], 1))
    return _in_order(rng.normal(size=shape) + share * later, places)


SOURCES: Mapping[str, tuple[Drawing, tuple[float, ...]]] = {
    "each arm, from block to block": (following_arms, STRENGTHS),
    "the same, Student's t with 3 degrees": (heavy_tails, STRENGTHS),
    "the same, the first place slower by one sd": (beside_places, STRENGTHS),
    "trials in running order": (following_time, (0.6, 0.9, 0.97)),
    "levels of the host's speed": (following_levels, (0.0,)),
    "drift of the host, sd a block": (drifting, (0.5, 2.0)),
    "one step of the host, sd": (stepping, (3.0, 30.0)),
}
"""Correlated quantity -> how it is drawn, and the strengths."""


@dataclass(frozen=True, kw_only=True)
class Dependent:
    """Effect of dependence of one strength."""

    plain: Rate
    """Wrong verdicts of the t test."""
    widened: Rate
    """Wrong verdicts of the t test, widened by A/A blocks and the blocks themselves."""
    power: Rate
    """Planted effects of `FOUND_SD` that it finds."""
    factors: Array
    """(repetitions,): by how much it was widened."""


def dependent(
    drawing: Drawing, share: float, *, blocks: int, repetitions: int, control: bool, level: float = FIRST
) -> Dependent:
    """Draw ablations of one variant without an effect, and judge them at `level`, that of a first asking.

    Their A/A blocks are those of a `control` in the same blocks, or twenty before them.
    """
    rng = np.random.default_rng([blocks, round(100 * share), control])
    places = places_of(repetitions, blocks, 3 if control else 2)
    trials = drawing(rng, places, share)
    d, x = (values[:, :, 1] - values[:, :, 0] for values in (trials, places))
    if not control:
        places = places_of(repetitions, ADMITTING_BLOCKS, 2)
        trials = drawing(rng, places, share)
    aa = likelihood(*(values[:, :, -1] - values[:, :, 0] for values in (trials, places)))
    factors = widened_by(aa, d[:, None], x[:, None])[:, 0]
    none, some = (fit(d + effect, x) for effect in (0.0, FOUND_SD * 2**0.5))
    return Dependent(
        plain=rate(none.p_different() <= level),
        widened=rate(none.widened(factors).p_different() <= level),
        power=rate(some.widened(factors).p_different() <= level),
        factors=factors,
    )


def _autoregressive(fresh: Array, share: float) -> Array:
    """Return independent noise as stationary first-order autoregressive noise of variance one along the last axis."""
    scaled = fresh * np.where(np.arange(fresh.shape[-1]) == 0, 1.0, (1 - share**2) ** 0.5)
    return np.asarray(signal.lfilter([1.0], [1.0, -share], scaled, axis=-1), dtype=np.float64)


def _in_order(trials: Array, places: Array) -> Array:
    """Return trials (repetitions, blocks x arms), in running order, by block and arm."""
    return np.take_along_axis(trials.reshape(places.shape), places.astype(np.intp), axis=-1)
