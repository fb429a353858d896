"""Dependence between blocks, simulated: drawn orders keep it out of d; what follows the arms is widened."""

import numpy as np
import pytest

from ablate.experiments.analysis.statistics import corrected, strength
from ablate.experiments.design.power import alpha_of
from tests.calibrations import make_block
from tests.simulation.dependence import dependent, following_arms, following_levels, following_time
from tests.simulation.test_cases import is_at_most

REPETITIONS = 1500


@pytest.mark.parametrize("blocks", [6, 10, 20])
@pytest.mark.parametrize(("drawing", "share"), [(following_time, 0.9), (following_levels, 0.0)])
def test_what_follows_time_makes_no_two_differences_alike(drawing, share, blocks):
    rates = dependent(drawing, share, blocks=blocks, repetitions=REPETITIONS)
    assert rates.seen < 0.05
    assert is_at_most(rates.plain, 0.05)


def test_what_follows_the_arms_is_seen_errs_and_is_mended():
    rates = dependent(following_arms, 0.4, blocks=10, repetitions=REPETITIONS)
    assert rates.seen == pytest.approx(0.4, abs=0.05)
    assert not is_at_most(rates.plain, 0.09)
    assert rates.widened.value < 0.6 * rates.plain.value


def test_independent_blocks_lose_little():
    rates = dependent(following_arms, 0.0, blocks=10, repetitions=REPETITIONS)
    assert is_at_most(rates.plain, alpha_of(1))
    assert is_at_most(rates.widened, alpha_of(1))
    assert rates.factor < 1.2


def test_the_simulated_estimate_is_the_one_of_calibrations():
    (d,), _ = following_arms(np.random.default_rng(7), 1, 20, 0.5)
    away = d - d.mean()
    seen = float(np.mean(away[1:] * away[:-1]) / np.mean(away**2))
    blocks = [make_block(index, difference=float(value)) for index, value in enumerate(d)]
    assert strength(blocks) == pytest.approx(corrected(seen, 20))
