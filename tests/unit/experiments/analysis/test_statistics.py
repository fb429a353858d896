"""The statistics against independent implementations (scipy, the normal equations), on random draws."""

import math

import numpy as np
import pytest
from scipy import stats

from ablate.experiments.analysis.statistics import fit, holm, log_ratio, percent, sign_flip_p, without_luck

D = [0.011, 0.004, 0.009, -0.002, 0.013, 0.007]
PLACES = [1, -1, -1, 1, 1, -1]


@pytest.mark.parametrize("seed", range(40))
def test_fit_is_least_squares_with_the_place(seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = int(rng.integers(4, 40))
    places = rng.integers(-4, 5, blocks) if seed % 2 else np.full(blocks, rng.integers(-4, 5))
    if np.ptp(places) == 0:
        places[rng.integers(blocks)] += 1  # the least by which places can differ
    d = 0.01 + 0.002 * places + rng.normal(0, 0.005, blocks)
    design = np.column_stack([np.ones(blocks), places])
    (mean, slope), *_ = np.linalg.lstsq(design, d, rcond=None)
    residual = d - design @ [mean, slope]
    variance = residual @ residual / (blocks - 2)
    se = math.sqrt(variance * np.linalg.inv(design.T @ design)[0, 0])
    fitted = fit(d, places)
    assert [float(x) for x in (fitted.mean, fitted.slope, fitted.se, fitted.sd)] == pytest.approx(
        [mean, slope, se, math.sqrt(variance)], rel=1e-9
    )
    assert float(fitted.p_different()) == pytest.approx(2 * stats.t.sf(abs(mean / se), blocks - 2), rel=1e-9)
    low, high = -0.004, 0.015
    tost = max(stats.t.sf((mean - low) / se, blocks - 2), stats.t.sf((high - mean) / se, blocks - 2))
    assert float(fitted.p_same(low, high)) == pytest.approx(tost, rel=1e-9)


def test_fit_of_many_ablations_is_that_of_each() -> None:
    d = np.random.default_rng(3).normal(0, 0.01, (5, 3, 6))
    together = fit(d, PLACES)
    for index in np.ndindex(5, 3):
        alone = fit(d[index], PLACES)
        assert [part[index] for part in (together.mean, together.se, together.slope)] == pytest.approx(
            [alone.mean, alone.se, alone.slope], rel=1e-12
        )


def test_fit_takes_an_effect_of_places_out_of_mean_and_spread() -> None:
    fitted = fit(np.array(D) + 0.5 * np.array(PLACES), PLACES)
    plain = fit(D, PLACES)
    assert float(fitted.mean) == pytest.approx(float(plain.mean))
    assert float(fitted.sd) == pytest.approx(float(plain.sd))
    assert float(fitted.slope - plain.slope) == pytest.approx(0.5)


def test_fit_leaves_places_out_that_do_not_vary() -> None:
    fitted = fit(D, [2] * 6)
    plain = stats.ttest_1samp(D, 0)
    interval = plain.confidence_interval(0.95)
    assert float(fitted.p_different()) == pytest.approx(plain.pvalue)
    assert fitted.interval(0.05) == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize(("value", "different", "same"), [(0.0, 1.0, 0.0), (0.01, 0.0, 1.0), (0.004, 0.0, 0.0)])
def test_fit_without_any_spread_is_a_point(value: float, different: float, same: float) -> None:
    fitted = fit([value] * 6, PLACES)
    assert fitted.interval(0.05) == pytest.approx((value, value))
    assert float(fitted.p_different()) == pytest.approx(different)
    assert float(fitted.p_same(-0.005, 0.005)) == pytest.approx(same)


@pytest.mark.parametrize("bad", [[], [0.1, 0.2, 0.3], [0.1, 0.2, 0.3, math.nan], [0.1, 0.2, 0.3, math.inf]])
def test_fit_refuses_what_it_cannot_judge(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="at least 4 finite"):
        fit(bad, [0] * len(bad))


def test_sign_flip_p_is_exact() -> None:
    expected = stats.permutation_test(
        (np.array(D),), np.mean, permutation_type="samples", n_resamples=np.inf, alternative="two-sided"
    )
    assert sign_flip_p(D) == pytest.approx(expected.pvalue)
    assert sign_flip_p([1.0, 2.0, 3.0, 1.5, 2.5, 0.5]) == 2 / 64
    assert sign_flip_p([1.0] * 5) == 2 / 32
    assert sign_flip_p([0.0] * 6) == 1.0


def test_sign_flip_p_beyond_sixteen_blocks_is_near_the_t_test() -> None:
    d = np.random.default_rng(1).normal(0.004, 0.01, 30)
    assert sign_flip_p(d) == pytest.approx(stats.ttest_1samp(d, 0).pvalue, abs=0.01)


@pytest.mark.parametrize("seed", range(20))
def test_holm_matches_the_step_down_by_hand(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = rng.uniform(0, 0.2, int(rng.integers(1, 9)))
    family = p.size + int(rng.integers(0, 3))
    expected, running = np.empty(p.size), 0.0
    for rank, index in enumerate(np.argsort(p)):
        running = max(running, min(1.0, (family - rank) * p[index]))
        expected[index] = running
    assert holm(p, family) == pytest.approx(expected)
    assert holm(np.stack([p, p[::-1]]), family) == pytest.approx(np.stack([expected, expected[::-1]]))


def test_percent_inverts_the_log_ratio() -> None:
    assert percent(math.log(1.0241)) == pytest.approx(2.41)
    assert log_ratio(percent(-0.03)) == pytest.approx(-0.03)


def test_the_mean_luck_of_estimates_beyond_an_end_is_that_of_scipy_and_of_draws() -> None:
    rng = np.random.default_rng(20261129)
    for _ in range(200):
        true, se = rng.normal(0, 0.02), 10 ** rng.uniform(-4, -1)
        least = true - se * rng.uniform(-3, 5)
        mean = stats.truncnorm.mean((least - true) / se, np.inf, loc=true, scale=se)
        assert true - float(without_luck(true, least, se)) == pytest.approx(mean - true, rel=1e-6, abs=1e-12)
    drawn = rng.normal(0.01, 0.005, 200_000)
    luck = 0.01 - float(without_luck(0.01, 0.012, 0.005))
    assert drawn[drawn > 0.012].mean() - 0.01 == pytest.approx(luck, rel=0.01)
