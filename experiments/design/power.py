"""Power of the paired t test: what a number of blocks can detect, and how many blocks an effect needs.

scipy is imported when a number is asked for: a node that runs a plan needs none, and may not have it.
"""

import math
from functools import lru_cache

ALPHA = 0.05
"""Two-sided level of every test."""
POWER = 0.8
MAX_BLOCKS = 2000
"""Blocks of a design, at most."""


@lru_cache(maxsize=4096)
def detectable_per_sd(blocks: int) -> float:
    """Return the smallest effect, in standard deviations of d, found with 80 % power by `blocks` paired blocks."""
    from scipy import optimize, special

    critical = float(special.stdtrit(blocks - 1, 1 - ALPHA / 2))

    def shortfall(shift: float) -> float:
        # The opposite tail adds less than 1e-5 here, and its distribution function is not defined everywhere.
        return float(1.0 - special.nctdtr(blocks - 1, shift, critical) - POWER)

    return float(optimize.brentq(shortfall, 0.3 * critical, 2.2 * critical)) / math.sqrt(blocks)


def blocks_to_detect(effect: float, sd: float, *, minimum: int) -> int | None:
    """Return the fewest blocks that detect `effect` at this `sd` (same unit), or None when `MAX_BLOCKS` are too few."""
    low, high = minimum, MAX_BLOCKS
    if detectable_per_sd(high) * sd > effect:
        return None
    while low < high:
        middle = (low + high) // 2
        if detectable_per_sd(middle) * sd <= effect:
            high = middle
        else:
            low = middle + 1
    return low
