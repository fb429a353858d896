"""What a verdict does not speak of: other nodes, luck that seeds share, and slow runs that its sample has none of."""

import numpy as np
import pytest

from ablate.experiments.design.power import alpha_of, blocks_for_events
from tests.simulation.cases import NO_MARGIN_PCT, noisy, outcomes, windows_in_parts
from tests.simulation.scopes import over_nodes, wrong_of_alike_seeds
from tests.simulation.test_cases import is_at_least, is_at_most
from tests.simulation.words import words_of

REPETITIONS = 750
LONG = "10 % of the variants' trials 50 % slower"


@pytest.mark.parametrize(("nodes", "blocks"), [(2, 6), (2, 20), (4, 20)])
@pytest.mark.parametrize("apart_pct", [0.25, 1.0])
def test_a_word_holds_for_the_nodes_that_ran_and_for_no_other(nodes: int, blocks: int, apart_pct: float) -> None:
    rates = over_nodes(nodes, apart_pct=apart_pct, blocks=blocks, repetitions=REPETITIONS)
    assert is_at_most(rates.of_these, alpha_of(1))
    assert is_at_most(rates.of_all_by_nodes, alpha_of(1))
    assert apart_pct < 1 or is_at_least(rates.of_all, 0.15)
    assert nodes > 2 or rates.detected_by_nodes.value < rates.detected.value / 2, "two nodes prove nothing of others"


@pytest.mark.parametrize("seeds", [6, 12, 24])
def test_luck_that_two_seeds_share_is_not_seen(seeds: int) -> None:
    alone, half = (wrong_of_alike_seeds(shared, seeds=seeds, repetitions=4000) for shared in (0.0, 0.5))
    assert is_at_most(alone, alpha_of(1))
    assert is_at_least(half, 0.07)
    assert is_at_most(half, 0.12)


@pytest.mark.parametrize("blocks", [6, 10, 20])
def test_slow_runs_make_errors_only_where_the_sample_has_none(blocks: int) -> None:
    """So no other estimate from the same blocks helps: their median errs in the same direction."""
    (windows, *_), none = windows_in_parts(noisy(LONG), blocks, 1, 250, 0), np.zeros(1)
    wrong = words_of(windows, alpha=alpha_of(1), margin_pct=NO_MARGIN_PCT, effects=none).changed[:, 0]
    slow = np.any(windows.d[:, 0] < -0.3, axis=1)
    assert wrong.any()
    assert not (wrong & slow).any()
    assert (np.median(windows.d[:, 0], axis=1)[wrong] > 0).all()


def test_the_blocks_of_a_rarest_event_keep_the_level_at_any_length_of_slow_runs() -> None:
    blocks = blocks_for_events(0.1, alpha_of(1))
    rates = outcomes(noisy(LONG), blocks=blocks, variants=1, repetitions=REPETITIONS)
    assert is_at_most(rates.wrong_difference, alpha_of(1))
