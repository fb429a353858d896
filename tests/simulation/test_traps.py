"""Analyses that look right and err: each is shown to be a trap, and that ours does not fall into it."""

from collections.abc import Callable

import numpy as np
import pytest

from ablate.experiments.analysis.statistics import percent
from ablate.experiments.design.power import alpha_of
from tests.simulation import draws, traps
from tests.simulation.cases import Stalls, noisy, outcomes
from tests.simulation.rates import Rate
from tests.simulation.test_cases import is_at_most

REPETITIONS = 400
NORMAL = noisy("normal")
RNG = np.random.default_rng(20261122)


def ours(noise: str, blocks: int, variants: int = 1) -> Rate:
    return outcomes(noisy(noise), blocks=blocks, variants=variants, repetitions=REPETITIONS).wrong_difference


@pytest.mark.parametrize(
    ("naive", "at_least", "noise", "blocks", "variants"),
    [
        (lambda: traps.steps_as_samples(RNG, REPETITIONS), 0.25, "normal", 6, 1),
        (lambda: traps.one_arm_after_the_other(RNG, REPETITIONS), 0.4, "drift of 1 %", 8, 1),
        (lambda: traps.fixed_alternation(RNG, REPETITIONS), 0.4, "first slot 0.5 % slower", 10, 1),
        (lambda: traps.until_significant(NORMAL, blocks=20, repetitions=REPETITIONS), 0.12, "normal", 10, 1),
        (lambda: traps.uncorrected(NORMAL, blocks=8, variants=12, repetitions=REPETITIONS), 0.25, "normal", 8, 12),
    ],
)
def test_a_naive_analysis_errs_and_ours_does_not(
    naive: Callable[[], Rate], at_least: float, noise: str, blocks: int, variants: int
) -> None:
    assert naive().value > at_least
    assert is_at_most(ours(noise, blocks, variants), alpha_of(1))


def test_bootstrap_intervals_miss_more_often_than_they_say() -> None:
    few = traps.bootstrap_misses(NORMAL, blocks=6, repetitions=REPETITIONS, studentised=False)
    assert few.value > 0.08
    assert not is_at_most(few, 0.05)


def test_dropping_outlier_steps_hides_stalls() -> None:
    stalled = draws.stalling(np.random.default_rng(0), 50, 6, 2, stalls=2, faster=0.0)
    assert percent(float(np.median(traps.outlier_steps_dropped(stalled)))) == pytest.approx(0, abs=0.5)
    assert Stalls(stalls=2, faster=0.0).effect_pct < -13
