import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from ablate.experiments.design.power import (
    ONE_LOOK,
    SESSION_ALPHA,
    Look,
    alpha_of,
    blocks_to_detect,
    detectable_per_sd,
    level_shares,
    look_levels,
    session_level,
)


@pytest.mark.parametrize(("blocks", "share"), [(4, 1), (6, 1), (6, 64), (50, 4), (2000, 1)])
@pytest.mark.parametrize("power", [0.8, 0.9])
def test_detectable_per_sd_has_the_power_asked_for(blocks: int, share: int, power: float) -> None:
    level = 0.04 / share
    critical = stats.t.ppf(1 - level / 2, blocks - 2)
    shift = detectable_per_sd(blocks, level=level, power=power) * np.sqrt(blocks)
    assert stats.nct.sf(critical, blocks - 2, shift) == pytest.approx(power, abs=1e-4)


def test_all_askings_of_a_question_together_keep_to_five_percent() -> None:
    assert (alpha_of(1), alpha_of(2), alpha_of(3)) == pytest.approx((0.04, 0.005, 0.01 / 6))
    assert 0.0499 < sum(alpha_of(number) for number in range(1, 10_000)) <= 0.05
    with pytest.raises(ValueError, match="count from 1, got 0"):
        alpha_of(0)


@pytest.mark.parametrize("looks", [(6,), (6, 10), (6, 10, 14, 20), tuple(range(6, 22))])
def test_all_looks_together_spend_the_level_once(looks: tuple[int, ...]) -> None:
    shares = level_shares(looks)
    assert sum(shares) == pytest.approx(1)
    assert len(shares) == len(looks)
    assert min(shares) > 0


@pytest.mark.parametrize("looks", [(6, 10), (6, 8, 12, 16), (1990, 2000), tuple(range(6, 22))])
def test_each_look_crosses_first_as_often_as_its_share_says(looks: tuple[int, ...]) -> None:
    rng, runs = np.random.default_rng(len(looks)), 400_000
    growth = np.sqrt(np.diff(np.array(looks, dtype=float), prepend=0))
    z = np.cumsum(rng.normal(size=(runs, len(looks))) * growth, axis=1) / np.sqrt(looks)
    crosses = np.abs(z) >= stats.norm.isf(np.array(look_levels(looks, 0.04)) / 2)
    first = np.bincount(np.argmax(crosses, axis=1)[crosses.any(axis=1)], minlength=len(looks)) / runs
    assert first == pytest.approx(0.04 * np.array(level_shares(looks)), abs=5 * np.sqrt(0.04 / runs))


@given(st.lists(st.integers(6, 200), min_size=2, max_size=6, unique=True), st.floats(1e-7, 0.3), st.data())
@settings(max_examples=25, deadline=None)
def test_a_p_value_over_all_looks_is_the_level_that_makes_it_significant(
    blocks: list[int], level: float, data: st.DataObject
) -> None:
    schedule = tuple(sorted(blocks))
    look = Look(schedule, data.draw(st.integers(0, len(blocks) - 1)))
    own = look.level(level)
    assert own == pytest.approx(look_levels(schedule, level)[look.number], rel=0.02)
    assert look.overall(own) == pytest.approx(level, rel=1e-3)
    assert own < level
    assert (ONE_LOOK.level(level), ONE_LOOK.overall(level)) == (level, level)


def test_blocks_to_detect_is_the_fewest() -> None:
    needed = blocks_to_detect(0.5, 0.7, minimum=6)
    assert needed is not None
    assert detectable_per_sd(needed) * 0.7 <= 0.5 < detectable_per_sd(needed - 1) * 0.7


def test_blocks_to_detect_keeps_the_minimum_and_gives_up_beyond_2000() -> None:
    assert blocks_to_detect(10.0, 0.1, minimum=7) == 7
    assert blocks_to_detect(0.001, 1.0, minimum=6) is None


def lord_plus_plus(number: int, kept: list[int]) -> float:
    """Return the one-sided level of LORD++ as its authors write it, with its sum over all t."""
    gamma = np.arange(1.0, number + 1) ** -1.3 / special.zeta(1.3)
    wealth = {0: 0.025, **dict.fromkeys(kept, 0.05)}
    if kept:
        wealth[min(kept)] = 0.05 - 0.025
    return float(sum(part * gamma[number - arrived - 1] for arrived, part in wealth.items()))


def test_levels_of_a_session_are_those_of_lord_plus_plus() -> None:
    rng = np.random.default_rng(29)
    for _ in range(300):
        number = int(rng.integers(1, 2000))
        kept = sorted({int(one) for one in rng.integers(1, number, rng.integers(0, 6))}) if number > 1 else []
        expected = 2 * lord_plus_plus(number, kept)
        assert expected * (1 - 2e-5) < session_level(number, rng.permutation(kept).tolist()) <= expected


def test_all_levels_of_a_session_keep_to_its_budget() -> None:
    """Without a keep they sum to half of it, and each keep brings at most the budget once more."""
    assert sum(session_level(number) / 2 for number in range(1, 20_000)) <= SESSION_ALPHA / 2
    always = [session_level(number, range(1, number)) / 2 for number in range(1, 400)]
    assert max(always) <= SESSION_ALPHA


@pytest.mark.parametrize(("number", "kept"), [(0, []), (-1, []), (3, [3]), (3, [0]), (3, [4])])
def test_a_level_needs_a_number_and_earlier_keeps(number: int, kept: list[int]) -> None:
    with pytest.raises(ValueError, match="proposals count from 1, and earlier ones were kept"):
        session_level(number, kept)
