"""Dependence: its estimate against long series, its widening against simulated means, and its way into a verdict."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.noise.calibrate import calibrate, key_of
from ablate.experiments.analysis.statistics import (
    MAX_STRENGTH,
    corrected,
    dependence_of,
    own_dependence,
    serial_correlation,
    strength,
    widening,
)
from ablate.experiments.design.plan import make_plan
from ablate.experiments.records.circumstances import CALIBRATED, Admission, Circumstances
from tests.calibrations import make_block
from tests.factories import make_receipt, make_receipts, make_spec

SPEC = make_spec()
PLAN = make_plan(SPEC)
OWN = key_of(SPEC, make_receipt(PLAN, 0, "baseline"))


def series(share: float, length: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 1, length)
    for index in range(1, length):
        values[index] = share * values[index - 1] + math.sqrt(1 - share**2) * values[index]
    return values


def blocks_of(d: np.ndarray, ablation: str = "abl_1"):
    return [make_block(index, difference=float(value) / 1000, ablation=ablation) for index, value in enumerate(d)]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.85])
def test_a_long_series_shows_its_strength(share):
    assert strength(blocks_of(series(share, 4000))) == pytest.approx(share, abs=0.05)


def test_the_blocks_themselves_are_tested_as_by_random_orders():
    rng = np.random.default_rng(4)
    for _ in range(20):
        n = int(rng.integers(16, 40))
        d, x = series(float(rng.choice([0.0, 0.5])), n, int(rng.integers(1000))), rng.choice([-1.0, 1.0], n)
        r, p = serial_correlation(d, x)
        columns = np.column_stack([np.ones(n), x])
        away = d - columns @ np.linalg.lstsq(columns, d, rcond=None)[0]
        assert float(r) == pytest.approx(float(away[1:] @ away[:-1] / (away @ away)))
        orders = [away[rng.permutation(n)] for _ in range(4000)]
        larger = np.mean([one[1:] @ one[:-1] / (one @ one) >= r for one in orders])
        assert float(p) == pytest.approx(larger, abs=0.04)
        assert float(own_dependence(d, x)) == (corrected(float(r) * n / (n - 1), n) if p <= 0.05 else 0.0)
    strong = series(0.9, 15, 1)
    assert float(own_dependence(strong, np.zeros(15))) == 0.0, "too few blocks"


def test_correlated_blocks_widen_their_own_tests():
    spec = make_spec(design__blocks={"count": 40})
    d, plan = series(0.8, 40, 3) / 300, make_plan(spec)
    receipts = [
        make_receipt(plan, block, arm, tokens_per_s=5000 * math.exp(d[block.index] if arm == "psiv-on" else 0.0))
        for block in plan.blocks
        for arm in block.order
    ]
    assert judge(plan, spec, receipts, CALIBRATED).variants[0].primary.widened > 1.5


@given(st.integers(2, 40), st.integers(0, 2**32 - 1))
def test_the_autocorrelation_of_few_aa_blocks_is_raised_by_half_a_standard_error(number, seed):
    known = calibrate(OWN, blocks_of(np.random.default_rng(seed).normal(0, 0.01, number)))
    estimate = strength(known.samples)
    expected = estimate if number >= 20 else min(0.9, estimate + 0.5 / math.sqrt(number))
    assert dependence_of([known]) == pytest.approx(expected)


def test_dependent_blocks_widen_the_tests_of_requirements_too():
    kept = {"metric": "tokens_per_s", "not_worse_by": "1%"}
    spec = make_spec(design__blocks={"count": 12}, verdict__require=[kept])
    known = calibrate(OWN, blocks_of(series(0.8, 40, 2)))
    plan, passed = make_plan(spec), []
    for calibrations in ((), (known,)):
        circumstances = Circumstances(admission=Admission(refused_because=None, calibrations=calibrations))
        verdict = judge(plan, spec, make_receipts(plan, {"psiv-on": 0.998}, sd=0.01), circumstances)
        passed.append(verdict.variants[0].requirements[0].passed)
    assert passed == [True, False]


def test_a_short_series_shows_it_on_average():
    estimates = [corrected(autocorrelation(series(0.4, 20, seed)), 20) for seed in range(2000)]
    assert np.mean(estimates) == pytest.approx(0.4, abs=0.05)


def autocorrelation(d: np.ndarray) -> float:
    away = d - d.mean()
    return float(np.mean(away[1:] * away[:-1]) / np.mean(away**2))


def test_opposite_neighbours_and_blocks_of_different_ablations_widen_nothing():
    assert strength(blocks_of(np.array([1.0, -1.0] * 10))) == 0.0
    assert strength([block for n in range(20) for block in blocks_of(np.array([n - 9.5]), f"abl_{n}")]) == 0.0
    assert strength(blocks_of(np.zeros(20))) == 0.0
    assert strength(blocks_of(np.arange(20.0))) == MAX_STRENGTH
    assert dependence_of([]) == 0.0


def test_neighbours_are_those_of_one_ablation():
    ups, downs = np.full(10, 1.0), np.full(10, -1.0)
    joined = [*blocks_of(ups, "abl_1"), *blocks_of(downs, "abl_2")]
    assert strength(joined) == MAX_STRENGTH
    mixed = [block for pair in zip(blocks_of(ups, "abl_1"), blocks_of(downs, "abl_2"), strict=True) for block in pair]
    assert strength(mixed) == MAX_STRENGTH


@pytest.mark.parametrize("blocks", [6, 10, 20])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8])
def test_the_widened_error_is_the_spread_of_means(share, blocks):
    """On average over series; so is the variance that they show, of which the error is made."""
    drawn = np.array([series(share, blocks, seed) for seed in range(8000)])
    shown = drawn.var(axis=1, ddof=1).mean() / blocks
    assert widening(share, blocks) ** 2 * shown == pytest.approx(drawn.mean(axis=1).var(), rel=0.06)


def test_a_verdict_is_widened_by_the_most_dependent_of_its_devices_and_says_so():
    receipts = make_receipts(PLAN, {"psiv-on": 1.01})
    quiet, slow = blocks_of(np.array([1.0, -1.0] * 10)), blocks_of(series(0.9, 30, 3))
    other = OWN.model_copy(update={"device_serial": "two"})
    known = tuple(calibrate(key, blocks) for key, blocks in ((OWN, quiet), (other, slow)))
    alone, both = (
        judge(PLAN, SPEC, receipts, Circumstances(admission=Admission(calibrations=own, refused_because=None)))
        for own in (known[:1], known)
    )
    narrow, wide = alone.variants[0].primary, both.variants[0].primary
    factor = widening(strength(slow), 6)
    assert (narrow.widened, wide.widened) == (1.0, factor)
    assert wide.delta_pct == narrow.delta_pct
    assert log(wide.ci_high_pct) - log(wide.delta_pct) == pytest.approx(
        factor * (log(narrow.ci_high_pct) - log(narrow.delta_pct))
    )
    assert log(wide.mde_pct) == pytest.approx(factor * log(narrow.mde_pct))
    assert wide.p_holm > narrow.p_holm
    (note,) = [note for note in both.variants[0].notes if "correlated" in note]
    assert f"{factor:.2f} times wider" in note
    assert not any("correlated" in note for note in alone.variants[0].notes)


def log(percent: float) -> float:
    return math.log1p(percent / 100)
