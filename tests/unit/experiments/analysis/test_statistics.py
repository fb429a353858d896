import math

import numpy as np
import pytest
from scipy import stats

from experiments.analysis.statistics import holm, paired, percent, sign_flip_p, t_p

D = [0.011, 0.004, 0.009, -0.002, 0.013, 0.007]


def test_paired_interval_is_student_t_below_twenty_blocks() -> None:
    found = paired(D)
    for level, interval in ((0.95, found.ci95), (0.90, found.ci90)):
        expected = stats.ttest_1samp(D, 0).confidence_interval(level)
        assert interval == pytest.approx((expected.low, expected.high))
    assert found.p_t == pytest.approx(stats.ttest_1samp(D, 0).pvalue)
    assert (found.mean, found.median) == pytest.approx((0.007, 0.008))
    assert found.sd == pytest.approx(np.std(D, ddof=1))


def test_sign_flip_p_is_exact() -> None:
    expected = stats.permutation_test(
        (np.array(D),), np.mean, permutation_type="samples", n_resamples=np.inf, alternative="two-sided"
    )
    assert sign_flip_p(D) == pytest.approx(expected.pvalue)
    assert sign_flip_p([1.0, 2.0, 3.0, 1.5, 2.5, 0.5]) == 2 / 64
    assert sign_flip_p([1.0] * 5) == 2 / 32


def test_sign_flip_p_beyond_twenty_blocks_is_near_the_t_test() -> None:
    d = np.random.default_rng(1).normal(0.004, 0.01, 30)
    assert sign_flip_p(d) == pytest.approx(t_p(d), abs=0.01)


def test_sign_flip_p_of_all_zero_is_one() -> None:
    assert sign_flip_p([0.0] * 6) == 1.0
    assert t_p([0.0] * 6) == 1.0
    assert t_p([0.01] * 6) == 0.0


def test_paired_from_twenty_blocks_is_a_studentised_bootstrap() -> None:
    d = np.random.default_rng(2).gamma(2.0, 0.005, 40)
    found = paired(list(d))
    plain = stats.ttest_1samp(d, 0).confidence_interval(0.95)
    bca = stats.bootstrap((d,), np.mean, method="BCa", rng=np.random.default_rng(0)).confidence_interval
    assert found.ci95 != pytest.approx((plain.low, plain.high), rel=1e-3)
    assert found.ci95[0] == pytest.approx(bca.low, rel=0.1)
    assert found.ci95[1] == pytest.approx(bca.high, rel=0.1)
    assert found.ci95[0] < found.ci90[0] < found.mean < found.ci90[1] < found.ci95[1]
    assert paired(list(d)) == found


def test_paired_without_any_spread_is_a_point() -> None:
    assert paired([0.01] * 25).ci95 == pytest.approx((0.01, 0.01))


@pytest.mark.parametrize("bad", [[], [0.1], [0.1, math.nan], [0.1, math.inf]])
def test_paired_refuses_what_it_cannot_judge(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="at least two finite"):
        paired(bad)


def test_holm_matches_the_step_down_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_percent_inverts_the_log_ratio() -> None:
    assert percent(math.log(1.0241)) == pytest.approx(2.41)
