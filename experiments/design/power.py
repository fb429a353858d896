"""Levels and power: the error budget of askings, looks and sessions, and the effect that a number of blocks detects.

scipy is imported on use: a node that runs a plan does not need it and may not have it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

ALPHA = 0.05
"""Error of a question over all askings: of a wrong better or worse, and likewise of a wrong same."""
FIRST_SHARE = 0.8
"""Share of `ALPHA` that the first asking spends."""
POWER = 0.8
PLANNED_POWER = 0.98
"""Power of a planned number of blocks: at least 90 % remain after stalls and spreads withhold words by chance."""
MAX_BLOCKS = 2000
"""Most blocks of a design."""
FEWER_BLOCKS = (
    "a quieter machine, a longer window (workload.steps.timed) or a larger effect (verdict.primary.adopt_if) "
    "needs fewer blocks"
)
"""Hint for designs that would need very many blocks."""
_EVENTS_PER_LOG = 2.5
_POINTS = 4096
"""Points of the distribution over which power is averaged."""
FEWEST_BLOCKS = 4
"""Fewest blocks of a comparison: below, mean and place leave fewer than two degrees of freedom."""


def alpha_of(number: int) -> float:
    """Return the two-sided level of the `number`-th asking of a question, from 1.

    4 % for the first and 1 % / (m (m - 1)) for the m-th: any number of askings sums to at most 5 %.
    """
    if number < 1:
        raise ValueError(f"askings count from 1, got {number}")
    first = FIRST_SHARE * ALPHA
    return first if number == 1 else (ALPHA - first) / (number * (number - 1))


SESSION_ALPHA = 0.05
"""Share of wrong *keep* among the *keep* of a session, in expectation."""
_SESSION_FIRST = SESSION_ALPHA / 2
"""Part of it that the proposals share until the first *keep*; the other part comes with that one."""
_DECAY = 1.3
_DECAY_SUM = 3.9319492119
"""Of t ** -1.3 over all t from 1 on, rounded up."""


def session_level(number: int, kept: Sequence[int] = ()) -> float:
    """Return the two-sided level of the `number`-th proposal of a session, from 1, after *keep* at the numbers `kept`.

    The method is LORD++ (docs/statistics.md). Its level is one-sided, because only *keep* is a discovery; a two-sided
    test at twice that level finds an improvement as often. Rounded down to six digits.
    """
    if number < 1 or any(not 1 <= one < number for one in kept):
        raise ValueError(f"proposals count from 1, and earlier ones were kept; got {number} after {list(kept)}")
    first, *later = sorted(kept) or [number]
    level = _SESSION_FIRST * _spent(number) + (SESSION_ALPHA - _SESSION_FIRST) * _spent(number - first)
    level = 2 * (level + SESSION_ALPHA * math.fsum(_spent(number - one) for one in later))
    digits = 10.0 ** (5 - math.floor(math.log10(level)))
    return math.floor(level * digits) / digits


def _spent(lag: int) -> float:
    """Return the share of a budget that the `lag`-th proposal after its arrival spends; zero at its arrival."""
    return lag**-_DECAY / _DECAY_SUM if lag else 0.0


def blocks_for_events(share: float, level: float) -> int:
    """Return the blocks that tests of two-sided `level` need if events strike a `share` of the runs of one arm only.

    An example is a slow mode of one process in ten. A t test keeps its error rate once so many events are expected:
    7, 11 and 16 at levels of 4, 1 and 0.1 %. The formula fits simulated ablations (docs/statistics.md).
    """
    return math.ceil((_EVENTS_PER_LOG * math.log(1 / level) - 1) / share)


def level_shares(looks: Sequence[int]) -> tuple[float, ...]:
    """Return the share of an ablation's level that each look spends: the growth of t**2, t the share of the blocks."""
    spent = [(look / looks[-1]) ** 2 for look in looks]
    return tuple(now - before for before, now in zip([0.0, *spent], spent, strict=False))


@dataclass(frozen=True)
class Look:
    """One of several looks at a growing number of blocks, as a group-sequential test (Lan and DeMets, 1983).

    The level of a look is the one at which all looks up to it, with their joint normal distribution, have spent their
    shares. p values of t tests are compared with it.
    """

    schedule: tuple[int, ...]
    number: int
    """From 0."""

    def level(self, level: float) -> float:
        """Return the two-sided level of this look, where all looks together have `level`."""
        import numpy as np

        if len(self.schedule) == 1:
            return level
        overall, own = _levels(self.schedule, self.number)
        return level * math.exp(float(np.interp(math.log(level), np.log(overall), np.log(own / overall))))

    def overall(self, p: Any) -> Any:
        """Return p values of this look as p values over all looks: the level of all that makes them significant."""
        import numpy as np

        if len(self.schedule) == 1:
            return np.asarray(p)
        overall, own = _levels(self.schedule, self.number)
        with np.errstate(divide="ignore"):
            more = np.interp(np.log(p), np.log(own), np.log(overall / own))
        return np.minimum(1.0, p * np.exp(more))


ONE_LOOK = Look((1,), 0)
_TABLED = 24


@lru_cache(maxsize=256)
def _levels(schedule: tuple[int, ...], number: int) -> tuple[Any, Any]:
    """Return levels of all looks together, and the level of one look for each."""
    import numpy as np

    overall = np.geomspace(1e-8, 0.5, _TABLED)
    return overall, np.array([look_levels(schedule, float(level))[number] for level in overall])


@lru_cache(maxsize=4096)
def look_levels(looks: tuple[int, ...], level: float) -> tuple[float, ...]:
    """Return the two-sided level of each look, by recursive integration (Armitage, McPherson and Rowe, 1969)."""
    import numpy as np
    from scipy import optimize, special

    levels, at, weights, before = [], np.zeros(1), np.ones(1), 0.0
    for look, share in zip(looks, level_shares(looks), strict=True):
        now = look / looks[-1]
        sd = math.sqrt(now - before)

        def crossed(bound: float, share: float = share, at: Any = at, weights: Any = weights, sd: float = sd) -> float:
            return float(2 * weights @ special.ndtr((at - bound) / sd)) / (share * level) - 1

        bound = float(optimize.brentq(crossed, 0.0, 15.0))
        levels.append(float(2 * special.ndtr(-bound / math.sqrt(now))))
        nodes, sizes = _legendre(32 * math.ceil(bound / sd / 8))
        density = np.exp(-(((bound * nodes[:, None] - at) / sd) ** 2) / 2) @ weights / (sd * math.sqrt(2 * math.pi))
        at, weights, before = bound * nodes, bound * sizes * density, now
    return tuple(levels)


@lru_cache(maxsize=64)
def _legendre(points: int) -> tuple[Any, Any]:
    import numpy as np

    return np.polynomial.legendre.leggauss(points)


@lru_cache(maxsize=4096)
def detectable_per_sd(blocks: int, *, level: float = FIRST_SHARE * ALPHA, power: float = POWER) -> float:
    """Return the smallest effect, in residual standard deviations of d, that `blocks` blocks detect with `power`.

    `level` is two-sided; divide it by the number of variants for the effect after correction. `blocks` is at least 4:
    one degree of freedom goes to the mean and one to the place in the block. The power is that of Student's t, averaged
    over the distribution of the estimated variance, because scipy's non-central t is undefined for small levels.
    """
    return _smallest(_reach(blocks, level), power) / math.sqrt(blocks)


def adopted_from(blocks: int, sd: float, *, margin: float, threshold: float, level: float) -> float:
    """Return the smallest true gain that the rule adopts with POWER, in the unit of `sd`.

    The estimate must reach `threshold`, and the interval of two-sided `level` must lie beyond `margin`. `sd` is that of
    d, times the factor of dependent blocks.
    """
    import numpy as np

    if sd <= 0:
        return max(margin, threshold)
    error = sd / math.sqrt(blocks)
    needed = np.maximum(margin / error + _reach(blocks, level), threshold / error)
    return _smallest(needed, POWER) * error


def _reach(blocks: int, level: float) -> Any:
    """Return half the width of intervals in true standard errors, over the distribution of the estimated variance."""
    import numpy as np
    from scipy import special

    freedom = blocks - 2
    middles = (np.arange(_POINTS) + 0.5) / _POINTS
    return special.stdtrit(freedom, 1 - level / 2) * np.sqrt(special.chdtri(freedom, middles) / freedom)


def _smallest(needed: Any, power: float) -> float:
    """Return the true effect whose estimate is at least `needed` with `power`, all in standard errors."""
    import numpy as np
    from scipy import optimize, special

    def shortfall(shift: float) -> float:
        return float(np.mean(special.ndtr(shift - needed))) - power  # the opposite tail adds less than 1e-5

    return float(optimize.brentq(shortfall, 0.0, 3 * float(needed.max()) + 10))


def blocks_to_detect(
    effect: float,
    sd: float,
    *,
    minimum: int,
    level: float = FIRST_SHARE * ALPHA,
    power: float = POWER,
    widening: Callable[[int], float] = lambda _blocks: 1.0,
) -> int | None:
    """Return the fewest blocks that detect `effect` at this `sd` (same unit); None when `MAX_BLOCKS` are too few.

    `widening` returns the factor by which dependence widens the tests of a number of blocks.
    """
    low, high = minimum, MAX_BLOCKS

    def detects(blocks: int) -> bool:
        return detectable_per_sd(blocks, level=level, power=power) * widening(blocks) * sd <= effect

    if not detects(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if detects(middle) else (middle + 1, high)
    return low
