"""Sessions: many proposals, each against the incumbent, at the levels of a session's budget and by greed.

Each proposal is an ablation of its own blocks, judged by `words_of`. Greed keeps whatever has the better estimate.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import special

from ablate.experiments.analysis.statistics import Array, log_ratio, without_luck
from ablate.experiments.design.power import session_level
from tests.simulation.cases import NO_MARGIN_PCT, Drawing
from tests.simulation.rates import Rate, rate
from tests.simulation.words import Flags, windows_of, words_of

PROPOSALS = 200
_AT_ONCE = 250


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The kept proposals of sessions: (sessions, proposals)."""

    by_budget: Flags
    by_greed: Flags
    gains: Array
    """The estimated gain in natural log units."""
    shrunk: Array
    """The same without the mean luck of kept ones, as it is shown of a kept proposal."""
    improves: Flags
    """Whether the proposal truly improves on the incumbent."""

    @property
    def any_false(self) -> Rate:
        """Sessions that keep at least one proposal that is no improvement."""
        return rate((self.by_budget & ~self.improves).any(axis=1))

    @property
    def any_false_by_greed(self) -> Rate:
        """The same by greed."""
        return rate((self.by_greed & ~self.improves).any(axis=1))

    @property
    def of_improvements(self) -> Rate:
        """Improvements that are kept."""
        return rate(self.by_budget[self.improves])

    def too_large(self, effect_pct: float) -> tuple[float, float]:
        """Return how many times the true effect the kept improvements show, and show shrunk."""
        right = self.by_budget & self.improves
        true = log_ratio(effect_pct)
        return float(self.gains[right].mean() / true), float(self.shrunk[right].mean() / true)

    def false_share(self, *, greed: bool = False) -> float:
        """Return the mean share of wrong ones among the kept ones: the false discovery rate."""
        kept = self.by_greed if greed else self.by_budget
        return float(np.mean((kept & ~self.improves).sum(axis=1) / np.maximum(1, kept.sum(axis=1))))


def sessions(
    drawing: Drawing, effects_pct: Array, *, blocks: int, margin_pct: float = NO_MARGIN_PCT, seed: int = 0
) -> Kept:
    """Simulate a session for every row of `effects_pct` (sessions, proposals), changes against the incumbent.

    With almost no margin only the statistics decide. A kept proposal is proved to be better by the margin.
    """
    rng = np.random.default_rng([seed, blocks])
    parts = [effects_pct[start : start + _AT_ONCE] for start in range(0, len(effects_pct), _AT_ONCE)]
    kept = [_kept(drawing, part, blocks, margin_pct, rng) for part in parts]
    return Kept(
        by_budget=np.concatenate([one.by_budget for one in kept]),
        by_greed=np.concatenate([one.by_greed for one in kept]),
        gains=np.concatenate([one.gains for one in kept]),
        shrunk=np.concatenate([one.shrunk for one in kept]),
        improves=np.concatenate([one.improves for one in kept]),
    )


def _kept(drawing: Drawing, effects_pct: Array, blocks: int, margin_pct: float, rng: np.random.Generator) -> Kept:
    margin = log_ratio(margin_pct)
    by_budget, by_greed = np.zeros((2, *effects_pct.shape), dtype=np.bool_)
    gains, shrunk = np.zeros((2, *effects_pct.shape))
    for index, effects in enumerate(effects_pct.T):
        levels = np.array([_level(index + 1, tuple((np.flatnonzero(row) + 1).tolist())) for row in by_budget])
        windows = windows_of(drawing(rng, len(effects), blocks, 2))
        shift = np.array([[log_ratio(effect)] for effect in effects])
        words = words_of(windows, alpha=levels[:, None], margin_pct=margin_pct, effects=shift)
        by_budget[:, index] = (words.better & (words.low >= margin))[:, 0]
        by_greed[:, index] = words.estimate[:, 0] > 0
        gain, low = words.estimate[:, 0], words.low[:, 0]
        se = (gain - low) / special.stdtrit(blocks - 2, 1 - levels / 2)
        gains[:, index] = gain
        shrunk[:, index] = np.maximum(low, without_luck(gain, np.minimum(gain, gain - low + margin), se))
    return Kept(by_budget=by_budget, by_greed=by_greed, gains=gains, shrunk=shrunk, improves=effects_pct > 0)


@lru_cache(maxsize=65_536)
def _level(number: int, kept: tuple[int, ...]) -> float:
    return session_level(number, kept)


def nulls(number: int, *, proposals: int = PROPOSALS) -> Array:
    """Return sessions whose proposals change nothing."""
    return np.zeros((number, proposals))


def planted(number: int, *, at: int, effect_pct: float) -> Array:
    """Return sessions whose last proposal, number `at`, improves, after proposals that change nothing."""
    effects = nulls(number, proposals=at)
    effects[:, -1] = effect_pct
    return effects


def mixed(number: int, *, share: float, effect_pct: float, seed: int = 0) -> Array:
    """Return sessions in which a random `share` of the proposals improves; the others change nothing."""
    improves = np.random.default_rng(seed).random((number, PROPOSALS)) < share
    return np.where(improves, effect_pct, 0.0)


def levels_without_keep(numbers: tuple[int, ...]) -> Iterator[tuple[int, float]]:
    """Yield (number, two-sided level) of proposals before any of which none was kept."""
    yield from ((number, session_level(number)) for number in numbers)
