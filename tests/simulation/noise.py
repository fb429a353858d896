"""Noise of measurements, as arrays of step times of ablations with equal arms.

Shapes: (repetitions, blocks, arms) for trials, (..., steps) for steps. Times are relative to a step of the baseline.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ablate.experiments.analysis.statistics import Array

SD = 0.005
"""Standard deviation of d, the difference of two trials of a block, in natural log units."""
TRIAL_SD = SD / 2**0.5
STEP_SD = 0.005
STEPS = 25


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The times of one set of repetitions, and the recorded reruns of arms."""

    seconds: Array
    """(repetitions, blocks, arms, steps)."""
    places: Array
    """(repetitions, blocks, arms): place of each arm in its block, from 0."""
    rerun: NDArray[np.bool_]
    """(repetitions, arms): whether a trial of the arm ended an attempt that was rerun."""
    aa: Array | None = None
    """(repetitions, A/A blocks): d of the blocks that calibrated each ablation's device. Without them no test is
    widened, and no noise is compared."""
    aa_places: Array | None = None
    """Like `aa`: the place of the repeat minus that of the baseline, or the other way round."""
    cut: NDArray[np.int_] | None = None
    """(repetitions, arms): attempts that were preempted during a trial of the arm."""
    control: bool = False
    """Whether the last arm repeats the baseline, and `aa` are its differences in the same blocks."""


TrialNoise = Callable[[np.random.Generator, Array], Array]
"""Function from random numbers and places to the logarithm of the time of trials."""


def normal(rng: np.random.Generator, places: Array) -> Array:
    """Return independent normal noise."""
    return rng.normal(0, TRIAL_SD, places.shape)


def outliers(rng: np.random.Generator, places: Array) -> Array:
    """Return normal noise; one trial in twenty, in any arm, is slower by ten standard deviations on average."""
    slow = rng.exponential(10 * TRIAL_SD, places.shape) * (rng.random(places.shape) < 0.05)
    return normal(rng, places) + slow


def skewed(rng: np.random.Generator, places: Array) -> Array:
    """Return exponential noise towards slower trials, in every arm, with the same standard deviation."""
    return rng.exponential(TRIAL_SD, places.shape) - TRIAL_SD


def autocorrelated(rng: np.random.Generator, places: Array) -> Array:
    """Return first-order autoregressive noise of 0.6 over trials in running order."""
    return _in_time(_autoregressive(rng, places.shape, 0.6), places)


def drifting(rng: np.random.Generator, places: Array) -> Array:
    """Return normal noise and a drift of 1 % from the first trial to the last."""
    _, blocks, arms = places.shape
    drift = np.linspace(0, 0.01, blocks * arms).reshape(blocks, arms)
    return normal(rng, places) + _in_time(np.broadcast_to(drift, places.shape), places)


def shared_by_block(rng: np.random.Generator, places: Array) -> Array:
    """Return normal noise and a part that all arms of a block share, twice as wide as d."""
    return normal(rng, places) + rng.normal(0, 2 * SD, (*places.shape[:2], 1))


def first_slot(rng: np.random.Generator, places: Array) -> Array:
    """Return normal noise; the first trial of every block is 0.5 % slower."""
    return normal(rng, places) + np.where(places == 0, 0.005, 0.0)


def skewed_in_variants(rng: np.random.Generator, places: Array) -> Array:
    """Return normal noise for the baseline and, for the variants, heavy lognormal noise with a mean of zero."""
    noise = 0.2 * normal(rng, places)
    heavy = rng.lognormal(0, 1.5, noise[:, :, 1:].shape)
    noise[:, :, 1:] += TRIAL_SD * (heavy - np.exp(1.5**2 / 2))
    return noise


def heavy_tails(rng: np.random.Generator, places: Array) -> Array:
    """Return noise of Student's t with three degrees of freedom, with the same standard deviation."""
    return np.asarray(TRIAL_SD * rng.standard_t(3, places.shape) / 3**0.5, dtype=np.float64)


def lognormal(rng: np.random.Generator, places: Array) -> Array:
    """Return lognormal noise towards slower trials, in every arm, with the same standard deviation."""
    return np.asarray(TRIAL_SD * _standard_lognormal(rng, places.shape), dtype=np.float64)


def two_modes(rng: np.random.Generator, places: Array) -> Array:
    """Return normal noise; three trials in ten, in any arm, run in a mode that is 1 % slower."""
    return normal(rng, places) + 0.01 * (rng.random(places.shape) < 0.3)


def following_arms(rng: np.random.Generator, places: Array) -> Array:
    """Return first-order autoregressive noise of 0.6 over the blocks of each arm."""
    by_arm = np.swapaxes(places, 1, 2)
    return np.swapaxes(_autoregressive(rng, (by_arm.shape[0] * by_arm.shape[1], by_arm.shape[2], 1), 0.6)
                       .reshape(by_arm.shape), 1, 2)  # fmt: skip


def slow_mode_of_variants(rng: np.random.Generator, places: Array, share: float = 0.1) -> Array:
    """Return normal noise; a `share` of a variant's trials is 5 % slower, and the others are faster to balance it."""
    noise = normal(rng, places)
    noise[:, :, 1:] += 0.05 * ((rng.random(noise[:, :, 1:].shape) < share) - share)
    return noise


def long_mode_of_variants(rng: np.random.Generator, places: Array) -> Array:
    """Return the same with 10 % of the trials 50 % slower: far more than the noise, and balanced by the others."""
    noise = normal(rng, places)
    noise[:, :, 1:] += 0.5 * ((rng.random(noise[:, :, 1:].shape) < 0.1) - 0.1)
    return noise


def wider_in_variants(rng: np.random.Generator, places: Array) -> Array:
    """Return normal noise that is three times as wide in the variants."""
    noise = normal(rng, places)
    noise[:, :, 1:] *= 3
    return noise


def doubled(rng: np.random.Generator, places: Array) -> Array:
    """Return normal noise, twice as wide as in the A/A blocks."""
    return 2 * normal(rng, places)


def two_nodes(rng: np.random.Generator, places: Array) -> Array:
    """Return the noise of blocks that two nodes run by turns.

    Every variant is 0.5 % faster on one and 0.5 % slower on the other one.
    """
    noise = normal(rng, places)
    noise[:, ::2, 1:] -= 0.005
    noise[:, 1::2, 1:] += 0.005
    return noise


def carried_over(rng: np.random.Generator, places: Array) -> Array:
    """Return normal noise; a trial right after one of the first variant is 1 % slower."""
    by_place = _in_time_order(normal(rng, places), places)
    first_variant = np.take_along_axis(places, np.ones_like(places[..., :1], dtype=np.intp), axis=-1)
    is_variant = np.arange(places.shape[-1]) == first_variant
    flat = by_place.reshape(len(places), -1)
    flat[:, 1:] += 0.01 * is_variant.reshape(len(places), -1)[:, :-1]
    return _in_time(flat.reshape(places.shape), places)


def _in_time_order(by_arm: Array, places: Array) -> Array:
    """Reorder values by arm into values by place in the block."""
    return np.take_along_axis(by_arm, np.argsort(places, axis=-1), axis=-1)


def _standard_lognormal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return np.asarray((rng.lognormal(size=shape) - np.exp(0.5)) / np.sqrt((np.e - 1) * np.e), dtype=np.float64)


def _autoregressive(rng: np.random.Generator, shape: tuple[int, ...], share: float) -> Array:
    fresh = rng.normal(0, TRIAL_SD, (shape[0], shape[1] * shape[2]))
    series = fresh.copy()
    for index in range(1, series.shape[1]):
        series[:, index] = share * series[:, index - 1] + (1 - share**2) ** 0.5 * fresh[:, index]
    return series.reshape(shape)


def _in_time(by_place: Array, places: Array) -> Array:
    """Reorder values by place in the block into values by arm."""
    return np.take_along_axis(np.asarray(by_place), places.astype(np.intp), axis=-1)


def steps_of(rng: np.random.Generator, trials: Array) -> Array:
    """Return the step times of trials whose logarithms are `trials`."""
    return np.exp(trials[..., None] + rng.normal(0, STEP_SD, (*trials.shape, STEPS)))
