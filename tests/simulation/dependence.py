"""Dependence between blocks: its sources, its effect on verdicts, and the effect of widening."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from scipy import signal

from ablate.experiments.analysis.statistics import Array, fit
from ablate.experiments.design.aa_spec import ADMITTING_BLOCKS
from ablate.experiments.design.power import alpha_of
from tests.simulation.draws import places_of
from tests.simulation.noise import SD, TRIAL_SD
from tests.simulation.rates import Rate, rate
from tests.simulation.words import autocorrelation, dependence_in, factors

STRENGTHS = (0.0, 0.2, 0.4, 0.6)
_LEVEL_S = 1.7
"""Mean length of a level of the host's speed, in trials: between very short and several blocks."""


def following_arms(rng: np.random.Generator, repetitions: int, blocks: int, share: float) -> tuple[Array, Array]:
    """Return (d, places), each (repetitions, blocks), with an autocorrelation of d of `share` in any running order."""
    return SD * _autoregressive(rng, (repetitions, blocks), share), _places(repetitions, blocks)


def following_time(rng: np.random.Generator, repetitions: int, blocks: int, share: float) -> tuple[Array, Array]:
    """Return (d, places) of trials with an autocorrelation of `share` in running order."""
    places = places_of(repetitions, blocks, 2)
    trials = TRIAL_SD * _autoregressive(rng, (repetitions, 2 * blocks), share).reshape(repetitions, blocks, 2)
    by_arm = np.take_along_axis(trials, places.astype(np.intp), axis=-1)
    return by_arm[:, :, 1] - by_arm[:, :, 0], places[:, :, 1] - places[:, :, 0]


def following_levels(rng: np.random.Generator, repetitions: int, blocks: int, _share: float) -> tuple[Array, Array]:
    """Return (d, places) of trials on a host that changes its speed by levels of random length."""
    places = places_of(repetitions, blocks, 2)
    changes = rng.random((repetitions, 2 * blocks)) < 1 / (1 + _LEVEL_S)
    level = np.maximum.accumulate(np.where(changes, np.arange(2 * blocks), 0), axis=1)
    speeds = rng.normal(0, 3 * TRIAL_SD, (repetitions, 2 * blocks))
    trials = np.take_along_axis(speeds, level, axis=1) + rng.normal(0, TRIAL_SD, (repetitions, 2 * blocks))
    by_arm = np.take_along_axis(trials.reshape(repetitions, blocks, 2), places.astype(np.intp), axis=-1)
    return by_arm[:, :, 1] - by_arm[:, :, 0], places[:, :, 1] - places[:, :, 0]


Drawing = Callable[[np.random.Generator, int, int, float], tuple[Array, Array]]

SOURCES: Mapping[str, tuple[Drawing, tuple[float, ...]]] = {
    "trials in running order": (following_time, (0.0, 0.6, 0.9, 0.97)),
    "levels of the host's speed": (following_levels, (0.0,)),
    "block differences": (following_arms, STRENGTHS),
}
"""Correlated quantity -> how it is drawn, and the strengths."""


@dataclass(frozen=True, kw_only=True)
class Dependent:
    """Effect of dependence of one strength."""

    seen: float
    """Mean autocorrelation of d in A/A blocks, corrected for bias."""
    plain: Rate
    """Wrong verdicts of the t test."""
    widened: Rate
    """Wrong verdicts of the t test, widened by each ablation's own calibration."""
    factor: float
    """Mean widening factor."""


def dependent(drawing: Drawing, share: float, *, blocks: int, repetitions: int, seed: int = 0) -> Dependent:
    """Draw calibrations and ablations without an effect, and judge them at the level of a first asking."""
    rng = np.random.default_rng([seed, blocks, round(100 * share)])
    calibration, _ = drawing(rng, repetitions, ADMITTING_BLOCKS, share)
    d, places = drawing(rng, repetitions, blocks, share)
    pairs = autocorrelation(calibration)
    widened = factors(dependence_in(calibration), blocks)
    fitted = fit(d, places)
    return Dependent(
        seen=float(np.mean((ADMITTING_BLOCKS * pairs + 1) / (ADMITTING_BLOCKS - 4))),
        plain=rate(fitted.p_different() <= alpha_of(1)),
        widened=rate(fitted.widened(widened).p_different() <= alpha_of(1)),
        factor=float(widened.mean()),
    )


def _places(repetitions: int, blocks: int) -> Array:
    places = places_of(repetitions, blocks, 2)
    return places[:, :, 1] - places[:, :, 0]


def _autoregressive(rng: np.random.Generator, shape: tuple[int, int], share: float) -> Array:
    """Return stationary first-order autoregressive noise of variance one along the last axis."""
    fresh = rng.normal(0, 1, shape) * np.where(np.arange(shape[1]) == 0, 1.0, (1 - share**2) ** 0.5)
    return np.asarray(signal.lfilter([1.0], [1.0, -share], fresh, axis=1), dtype=np.float64)
