"""Dependence: whether differences of neighbouring blocks resemble each other, and what that does to a mean of them.

Running orders are drawn, so what happens to places and times of trials makes no two differences alike, however slowly
it changes (docs/statistics.md). What follows the arms does: then the mean of n blocks is less certain than n
independent ones would make it, and a t test errs more often than it says. A/A blocks show how strong it is; tests and
intervals are widened by what an autoregressive process of that strength asks for.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from experiments.records.calibration import AABlock, Calibration

MAX_STRENGTH = 0.9
"""Beyond it a few blocks say nothing about their mean."""


def dependence_of(calibrations: Iterable[Calibration]) -> float:
    """Return the strongest dependence that the A/A blocks of any device show; 0 where there are none."""
    return max((strength(one.samples) for one in calibrations), default=0.0)


def strength(samples: Sequence[AABlock]) -> float:
    """Return the lag-one autocorrelation of the differences of blocks that follow each other in one ablation.

    Corrected for its bias of about -(1 + 4 r) / n, and between 0 and `MAX_STRENGTH`: it only ever widens.
    """
    d = [block.difference for block in samples]
    mean = math.fsum(d) / len(d)
    squares = math.fsum((value - mean) ** 2 for value in d)
    products = [
        (one.difference - mean) * (other.difference - mean)
        for ablation in dict.fromkeys(block.ablation for block in samples)
        for one, other in pairwise(block for block in samples if block.ablation == ablation)
    ]
    if not products or squares == 0:
        return 0.0
    return corrected(math.fsum(products) / len(products) / (squares / len(d)), len(d))


def corrected(autocorrelation: float, blocks: int) -> float:
    """Return an estimated autocorrelation without its bias, between 0 and `MAX_STRENGTH`."""
    if blocks <= 4:
        return 0.0
    return min(MAX_STRENGTH, max(0.0, (blocks * autocorrelation + 1) / (blocks - 4)))


def widening(dependence: float, blocks: int) -> float:
    """Return the factor by which the standard error of a mean of `blocks` differences has to grow.

    Their mean has `more` times the variance of an independent one's, and the variance that they show is too small.
    """
    more = 1 + 2 * math.fsum((1 - lag / blocks) * dependence**lag for lag in range(1, blocks))
    return math.sqrt(more / (1 - (more - 1) / (blocks - 1)))
