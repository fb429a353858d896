"""Levels and power: what each asking of a question and each look may spend, what a number of blocks can detect.

scipy is imported when a number is asked for: a node that runs a plan needs none, and may not have it.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

ALPHA = 0.05
"""Error of a question over all its askings: of a wrong better or worse, and likewise of a wrong same."""
FIRST_SHARE = 0.8
"""Share of it that the first asking spends."""
POWER = 0.8
PLANNED_POWER = 0.98
"""Of a number of blocks that is planned: words that stalls or spreads withhold by chance leave at least 90 %."""
MAX_BLOCKS = 2000
"""Blocks of a design, at most."""
FEWER_BLOCKS = (
    "a quieter machine, a longer window (workload.steps.timed) or a larger effect (verdict.primary.adopt_if) "
    "needs fewer blocks"
)
"""What helps where a design would need very many."""
_POINTS = 4096
"""Points of a distribution over which power is averaged."""
FEWEST_BLOCKS = 4
"""Blocks below which nothing is compared: mean and place would leave fewer than two degrees of freedom."""


def alpha_of(number: int) -> float:
    """Return the two-sided level of the `number`-th asking of a question, from 1.

    4 % for the first and 1 % / (m (m - 1)) for the m-th: over any number of askings they sum to at most 5 %.
    """
    if number < 1:
        raise ValueError(f"askings count from 1, got {number}")
    first = FIRST_SHARE * ALPHA
    return first if number == 1 else (ALPHA - first) / (number * (number - 1))


def level_shares(looks: Sequence[int]) -> tuple[float, ...]:
    """Return the share of an ablation's level that each look spends: from t**2, t being the share of the blocks.

    The shares sum to one, and a look's test is an ordinary one at its share: whatever the looks have in common, the
    chance of any false word is at most the sum.
    """
    spent = [(look / looks[-1]) ** 2 for look in looks]
    return tuple(now - before for before, now in zip([0.0, *spent], spent, strict=False))


@lru_cache(maxsize=4096)
def detectable_per_sd(blocks: int, *, level: float = FIRST_SHARE * ALPHA, power: float = POWER) -> float:
    """Return the smallest effect, in residual standard deviations of d, that `blocks` blocks find with `power`.

    `level` is two-sided; divide it by the number of variants for what holds after correction. One degree of freedom
    goes to the mean and one to the place in the block, whose orders are balanced; at least 4 blocks. The power is that
    of Student's t, as the mean over the distribution of the estimated variance: the library's non-central t is not
    defined for small levels.
    """
    import numpy as np
    from scipy import optimize, special

    freedom = blocks - 2
    middles = (np.arange(_POINTS) + 0.5) / _POINTS
    threshold = special.stdtrit(freedom, 1 - level / 2) * np.sqrt(special.chdtri(freedom, middles) / freedom)

    def shortfall(shift: float) -> float:
        return float(np.mean(special.ndtr(shift - threshold))) - power  # the opposite tail adds less than 1e-5

    return float(optimize.brentq(shortfall, 0.0, 3 * float(threshold.max()) + 10)) / math.sqrt(blocks)


def _not_widened(_blocks: int) -> float:
    return 1.0


def blocks_to_detect(
    effect: float,
    sd: float,
    *,
    minimum: int,
    level: float = FIRST_SHARE * ALPHA,
    power: float = POWER,
    widening: Callable[[int], float] = _not_widened,
) -> int | None:
    """Return the fewest blocks that detect `effect` at this `sd` (same unit), or None when `MAX_BLOCKS` are too few.

    `widening` is the factor by which tests of so many blocks are wider than those of independent ones.
    """
    low, high = minimum, MAX_BLOCKS

    def found(blocks: int) -> bool:
        return detectable_per_sd(blocks, level=level, power=power) * widening(blocks) * sd <= effect

    if not found(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle) else (middle + 1, high)
    return low
