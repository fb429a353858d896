import numpy as np
import pytest
from scipy import stats

from experiments.design.power import blocks_to_detect, detectable_per_sd


@pytest.mark.parametrize(("blocks", "percent"), [(3, 3.26), (6, 1.43), (8, 1.16), (10, 1.00), (20, 0.66), (30, 0.53)])
def test_detectable_per_sd_matches_the_protocol_table(blocks: int, percent: float) -> None:
    assert detectable_per_sd(blocks) == pytest.approx(percent, abs=0.006)


@pytest.mark.parametrize("blocks", [2, 6, 50, 2000])
def test_detectable_per_sd_has_eighty_percent_power(blocks: int) -> None:
    critical = stats.t.ppf(0.975, blocks - 1)
    shift = detectable_per_sd(blocks) * np.sqrt(blocks)
    assert stats.nct.sf(critical, blocks - 1, shift) == pytest.approx(0.8, abs=1e-4)


def test_blocks_to_detect_is_the_fewest() -> None:
    needed = blocks_to_detect(0.5, 0.7, minimum=6)
    assert needed is not None
    assert detectable_per_sd(needed) * 0.7 <= 0.5 < detectable_per_sd(needed - 1) * 0.7


def test_blocks_to_detect_keeps_the_minimum_and_gives_up_beyond_2000() -> None:
    assert blocks_to_detect(10.0, 0.1, minimum=7) == 7
    assert blocks_to_detect(0.001, 1.0, minimum=6) is None
