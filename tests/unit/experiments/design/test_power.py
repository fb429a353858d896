import numpy as np
import pytest
from scipy import stats

from experiments.design.power import alpha_of, blocks_to_detect, detectable_per_sd, level_shares


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


def test_blocks_to_detect_is_the_fewest() -> None:
    needed = blocks_to_detect(0.5, 0.7, minimum=6)
    assert needed is not None
    assert detectable_per_sd(needed) * 0.7 <= 0.5 < detectable_per_sd(needed - 1) * 0.7


def test_blocks_to_detect_keeps_the_minimum_and_gives_up_beyond_2000() -> None:
    assert blocks_to_detect(10.0, 0.1, minimum=7) == 7
    assert blocks_to_detect(0.001, 1.0, minimum=6) is None
