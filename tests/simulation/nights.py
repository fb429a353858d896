"""Years of nights of `ablate nightly` by the judge's words, and a change point detector on the nightly means alone.

Every night has a new commit. Its ablation has the commit as the baseline beside the last accepted one and the pinned
one; where a variant is better, a second ablation of these variants follows. Levels are ln(throughput).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ablate.experiments.analysis.noise.history import find_changes
from ablate.experiments.analysis.statistics import Array, log_ratio
from ablate.experiments.design.power import alpha_of
from tests.simulation import draws
from tests.simulation.noise import SD, TRIAL_SD, TrialNoise, normal
from tests.simulation.words import Flags, windows_of, words_of

NIGHTS = 365
BLOCKS = 10
MARGIN_PCT = 0.5
_WINDOW = 60
"""Newest nights that the change point detector sees."""
_QUIET = 10
"""Nights after an alarm of the detector in which another one is the same alarm."""


@dataclass(frozen=True, kw_only=True)
class Year:
    """What happens in the nights."""

    noise: TrialNoise = normal
    of_aa: TrialNoise = normal
    step_pct: float = 0.0
    """Change that the commit of one night makes; negative is a loss."""
    at: int = 40
    """That night, from 0."""
    creep_pct: float = 0.0
    """Change that every commit makes."""
    blocks: int = BLOCKS
    drift: float = SD
    """Standard deviation of the machine's level from night to night, which all arms of a night share."""
    nights: int = NIGHTS

    def levels(self) -> Array:
        """Return the level of each night's commit, the pinned one at 0."""
        number = np.arange(self.nights)
        return np.asarray(
            log_ratio(self.creep_pct) * (number + 1) + log_ratio(self.step_pct) * (number >= self.at), dtype=np.float64
        )


def losing_the_margin(**changes: Any) -> Year:
    """Return a year in which every commit is worse than the pinned one by exactly the margin: still no *worse*."""
    return Year(step_pct=-100 * (1 - 1 / (1 + MARGIN_PCT / 100)), at=0, **changes)


def new_commit(noise: TrialNoise) -> TrialNoise:
    """Return a noise of variants as that of the new commit alone, which is the baseline."""

    def swapped(rng: np.random.Generator, places: Array) -> Array:
        drawn = noise(rng, places)
        plain = normal(rng, places)
        plain[:, :, 0] = drawn[:, :, -1]
        return plain

    return swapped


def confirmed(year: Year, watches: int, seed: int = 1) -> tuple[Flags, Flags]:
    """Return the nights in which the first ablation says worse, and those that the second confirms.

    Both have the shape (watches, nights). A confirmed commit is not accepted.
    """
    rng = np.random.default_rng(seed)
    levels, accepted = year.levels(), np.zeros(watches)
    first, both = np.zeros((2, watches, year.nights), dtype=np.bool_)
    for night, level in enumerate(levels):
        better = _better(year, rng, np.stack([accepted - level, np.full(watches, -level)], axis=-1), 1)
        first[:, night] = better.any(axis=-1)
        for suspects in ([True, False], [False, True], [True, True]):
            rows = np.flatnonzero((better == suspects).all(axis=-1))
            if rows.size:
                effects = np.stack([accepted[rows] - level, np.full(rows.size, -level)], axis=-1)[:, suspects]
                both[rows, night] = _better(year, rng, effects, 2).any(axis=-1)
        accepted = np.where(both[:, night], accepted, level)
    return first, both


def _better(year: Year, rng: np.random.Generator, effects: Array, asking: int) -> Flags:
    """Return which earlier commits one ablation of each row proves to be better than the new one."""
    rows, variants = effects.shape
    draw = draws.noisy(year.noise, rng, rows, year.blocks, variants + 1, of_aa=year.of_aa)
    words = words_of(windows_of(draw), alpha=alpha_of(asking), margin_pct=MARGIN_PCT, effects=effects)
    return words.better


def detected(year: Year, watches: int, seed: int = 2) -> Flags:
    """Return the nights (watches, nights) in which the change point detector finds a new loss in the means so far."""
    rng = np.random.default_rng(seed)
    own = rng.normal(0, TRIAL_SD / year.blocks**0.5, (watches, year.nights))
    means = year.levels() + own + rng.normal(0, year.drift, own.shape)
    alarms = np.zeros(means.shape, dtype=np.bool_)
    for row, series in zip(alarms, means, strict=True):
        heard = -_QUIET
        for night in range(8, year.nights):
            start = max(0, night + 1 - _WINDOW)
            seen = series[start : night + 1]
            changes = [0, *find_changes(seen), len(seen)]
            if len(changes) > 2 and night - heard >= _QUIET and start + changes[-2] > heard:
                before, after = seen[changes[-3] : changes[-2]].mean(), seen[changes[-2] :].mean()
                if after < before:
                    row[night], heard = True, night
    return alarms


def nights_until(alarms: Flags, since: int) -> Array:
    """Return the nights from `since` to the first alarm, 1 for the same night; infinite without one (watches,)."""
    later = alarms[:, since:]
    return np.where(later.any(axis=1), later.argmax(axis=1) + 1.0, np.inf)
