"""Runs that never reach their target: the rule never says *better* of an arm that has one, and loses little power."""

import pytest

from ablate.experiments.design.power import alpha_of
from ablate.experiments.outcomes import VerdictWord
from tests.simulation.targets import RULES, Arms, by_ends, drawn, word_rates
from tests.simulation.test_cases import is_at_least, is_at_most

REPETITIONS = 300


@pytest.mark.parametrize("seeds", [6, 8, 12, 24])
def test_better_is_wrong_only_where_no_run_of_the_sample_misses_the_target(seeds: int) -> None:
    """A tenth of the variant's runs never arrives; the others need a tenth less."""
    arms = Arms(change=-0.1, never=(0.1, 0.0))
    rates = {rule: word_rates(arms, seeds=seeds, repetitions=REPETITIONS, rule=rule) for rule in RULES}
    better = {rule: one[VerdictWord.BETTER] for rule, one in rates.items()}
    assert is_at_most(better["now"], 0.9**seeds)
    assert better["left out"].value > 0.9
    for runs in drawn(arms, seeds, REPETITIONS):
        assert by_ends(runs) is not VerdictWord.BETTER or not any(own.censored for own, _ in runs)


@pytest.mark.parametrize("seeds", [6, 12, 24])
def test_runs_of_equal_arms_that_miss_the_target_make_no_words(seeds: int) -> None:
    rates = word_rates(Arms(never=(0.1, 0.1)), seeds=seeds, repetitions=REPETITIONS)
    assert is_at_most(rates[VerdictWord.BETTER] + rates[VerdictWord.WORSE], alpha_of(1) / 2)


@pytest.mark.parametrize(("never", "least", "before"), [(1.0, 0.7, 0.0), (0.1, 0.6, 0.15)])
def test_runs_of_the_baseline_that_miss_the_target_leave_the_variant_its_word(
    never: float, least: float, before: float
) -> None:
    arms = Arms(change=-0.1, never=(0.0, never))
    now, was = (word_rates(arms, seeds=24, repetitions=REPETITIONS, rule=rule) for rule in ("now", "was"))
    assert is_at_least(now[VerdictWord.BETTER], least)
    assert is_at_most(was[VerdictWord.BETTER], before)
    assert now[VerdictWord.WORSE].hits == 0
