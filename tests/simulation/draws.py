"""Draws: sets of simulated ablations in the running orders of plans, one function per kind of trouble."""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from ablate.experiments.analysis.statistics import Array
from ablate.experiments.design.aa_spec import ADMITTING_BLOCKS
from ablate.experiments.design.plan import orders
from tests.simulation.noise import STEPS, Draw, TrialNoise, normal, steps_of

ORDERS = 64
"""Number of running orders, each from its own seed, that the repetitions share."""
STALL = 3.0
"""Duration of a stalled step, in steps."""


def noisy(
    noise: TrialNoise, rng: np.random.Generator, repetitions: int, blocks: int, arms: int, *, of_aa: TrialNoise = normal
) -> Draw:
    """Return ablations without any effect under this noise of trials; `of_aa` is that of the A/A blocks before them."""
    places = places_of(repetitions, blocks, arms)
    return _clean(steps_of(rng, noise(rng, places)), places, calibration(rng, repetitions, of_aa))


def with_control(noise: TrialNoise, rng: np.random.Generator, repetitions: int, blocks: int, arms: int) -> Draw:
    """Return ablations without any effect whose A/A blocks are those of a control arm in the same blocks."""
    places = places_of(repetitions, blocks, arms + 1)
    trials = noise(rng, places)
    aa = tuple(values[:, :, 0] - values[:, :, -1] for values in (trials, places))
    return replace(_clean(steps_of(rng, trials), places, aa), control=True)


def calibration(rng: np.random.Generator, repetitions: int, noise: TrialNoise = normal) -> tuple[Array, ...]:
    """Return d and places of A/A blocks, each (repetitions, blocks), as many as admit a device."""
    places = places_of(repetitions, ADMITTING_BLOCKS, 2)
    return tuple(values[:, :, 0] - values[:, :, 1] for values in (noise(rng, places), places))


def stalling(
    rng: np.random.Generator, repetitions: int, blocks: int, arms: int, *, stalls: float, faster: float
) -> Draw:
    """Return ablations whose variants stall in `stalls` steps per window on average; other steps are `faster` (log)."""
    places = places_of(repetitions, blocks, arms)
    seconds = steps_of(rng, normal(rng, places))
    slow = rng.random(seconds[:, :, 1:].shape) < stalls / STEPS
    seconds[:, :, 1:] *= np.where(slow, STALL, 1.0) * np.exp(-faster)
    return _clean(seconds, places, calibration(rng, repetitions))


def crashing(
    rng: np.random.Generator, repetitions: int, blocks: int, arms: int, *, chance: float, preempted: bool = False
) -> Draw:
    """Return ablations whose variants have slow trials with this `chance`, all of which crash or are `preempted`.

    Such a trial is rerun until it ends, so no slow trial is measured. The rerun is recorded.
    """
    places = places_of(repetitions, blocks, arms)
    ended = np.zeros((repetitions, arms), dtype=np.int_)
    ended[:, 1:] = np.count_nonzero(rng.random((repetitions, blocks, arms - 1)) < chance, axis=1)
    draw = _clean(steps_of(rng, normal(rng, places)), places, calibration(rng, repetitions))
    return replace(draw, cut=ended) if preempted else replace(draw, rerun=ended > 0)


def true_effect_of_stalls(*, stalls: float, faster: float) -> float:
    """Return the mean effect of `stalling` on ln(throughput), by the binomial number of stalled steps."""
    numbers = np.arange(STEPS + 1)
    share = stalls / STEPS
    ways = np.array([_ways(STEPS, int(number)) for number in numbers])
    weights = ways * share**numbers * (1 - share) ** (STEPS - numbers)
    return float(faster - weights @ np.log(1 + (STALL - 1) * numbers / STEPS))


def _ways(whole: int, part: int) -> float:
    return float(np.prod(np.arange(whole - part + 1, whole + 1) / np.arange(1, part + 1)))


def _clean(seconds: Array, places: Array, aa: tuple[Array, ...]) -> Draw:
    rerun = np.zeros((places.shape[0], places.shape[2]), dtype=np.bool_)
    return Draw(seconds=seconds, places=places, rerun=rerun, aa=aa[0], aa_places=aa[1])


def places_of(repetitions: int, blocks: int, arms: int) -> Array:
    """Return the places of every arm, (repetitions, blocks, arms), in the running orders of plans."""
    places = _places(blocks, arms)
    return places[np.arange(repetitions) % len(places)]


@lru_cache(maxsize=64)
def _places(blocks: int, arms: int) -> Array:
    names = [str(arm) for arm in range(arms)]
    rows = [orders(names, blocks=blocks, seed=seed) for seed in range(ORDERS)]
    return np.array([[[order.index(name) for name in names] for order in row] for row in rows], dtype=np.float64)
