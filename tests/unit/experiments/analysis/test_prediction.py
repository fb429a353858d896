"""Chances of an answer, against ablations that are drawn block by block and fitted."""

import numpy as np
import pytest

from ablate.experiments.analysis.prediction import ENOUGH, SIZES, Conditions, Estimate, chance_with_more, chances
from ablate.experiments.analysis.statistics import Array, fit, log_ratio
from tests.simulation.draws import places_of

DRAWS = 3000
CLOSE = 0.035
"""More than three Monte-Carlo standard errors of both sides."""


def uncertain(known: Estimate, rng: np.random.Generator) -> tuple[Array, Array]:
    """Draw effects and noises that the known blocks leave possible, by the definitions of t and chi-square."""
    freedom = known.blocks - 2
    sd = known.sd * np.sqrt(freedom / np.sum(rng.normal(size=(freedom, DRAWS)) ** 2, axis=0))
    return known.mean + sd * rng.normal(size=DRAWS) / np.sqrt(known.blocks), sd


def answered(d: Array, places: Array, asked: Conditions) -> float:
    fitted = fit(d, places)
    low, high = log_ratio(-asked.margin_pct), log_ratio(asked.margin_pct)
    ends = fitted.interval(asked.level)
    beyond = (ends[1] < low) | (ends[0] > high)
    same = fitted.p_same(low, high) <= asked.level
    return float(np.mean(beyond | same))


def places(blocks: int) -> Array:
    by_arm = places_of(DRAWS, blocks, 2)
    return np.asarray(by_arm[:, :, 1] - by_arm[:, :, 0])


KNOWN = [
    Estimate(mean=0.01, sd=0.01, blocks=6),
    Estimate(mean=0.0, sd=0.004, blocks=10),
    Estimate(mean=-0.004, sd=0.008, blocks=20),
    Estimate(mean=0.05, sd=0.14, blocks=6),
]


@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("level", [0.04, 0.00125])
def test_chances_are_those_of_ablations_that_are_drawn_whole(known: Estimate, level: float) -> None:
    asked, rng = Conditions(level=level, margin_pct=0.5), np.random.default_rng(1)
    by_size = chances(known, asked)
    for size in list(by_size)[-2:]:
        mean, sd = uncertain(known, rng)
        d = mean[:, None] + sd[:, None] * rng.normal(size=(DRAWS, size))
        assert by_size[size] == pytest.approx(answered(d, places(size), asked), abs=CLOSE)


def test_chances_end_with_the_first_that_is_enough() -> None:
    by_size = chances(Estimate(mean=0.01, sd=0.01, blocks=6), Conditions(level=0.005, margin_pct=0.5))
    *less, enough = by_size.values()
    assert enough >= ENOUGH > max(less)
    assert list(by_size) == list(SIZES[: len(by_size)])


@pytest.mark.parametrize("more", [4, 8, 14])
@pytest.mark.parametrize("effect", [0.0, 0.004, 0.012])
def test_chance_with_more_is_that_of_blocks_that_are_added(more: int, effect: float) -> None:
    """The known blocks are kept as they are, the others drawn."""
    rng, asked = np.random.default_rng(2), Conditions(level=0.02, margin_pct=0.5)
    before = effect + rng.normal(0, 0.006, 6)
    order = places(6 + more)[0]
    first = fit(before, order[:6])
    known = Estimate(mean=float(first.mean), sd=float(first.sd), blocks=6)
    mean, sd = uncertain(known, rng)
    later = mean[:, None] + float(first.slope) * order[6:] + sd[:, None] * rng.normal(size=(DRAWS, more))
    whole = np.concatenate([np.broadcast_to(before, (DRAWS, 6)), later], axis=1)
    assert chance_with_more(known, asked, more) == pytest.approx(answered(whole, order, asked), abs=2 * CLOSE)
