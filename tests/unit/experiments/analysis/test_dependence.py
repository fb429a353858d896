"""Dependence: its estimate against long series, its widening against simulated means, and its way into a verdict."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.noise.calibrate import calibrate, key_of
from ablate.experiments.analysis.statistics import (
    LIKELY,
    STRENGTHS,
    dependence_of,
    likelihood,
    strength_of,
    strongest,
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


def strength(blocks) -> float:
    return strength_of(dependence_of([calibrate(OWN, blocks)]))


def densely(d, columns, share):
    """Return the restricted log likelihood by the matrix of all correlations."""
    n = len(d)
    inverse = np.linalg.inv(np.array([[share ** abs(one - other) for other in range(n)] for one in range(n)]))
    design = np.column_stack([*columns, np.zeros((n, 0))])
    squares = design.T @ inverse @ design
    away = d - design @ np.linalg.solve(squares, design.T @ inverse @ d)
    left = (n - design.shape[1]) * math.log(away @ inverse @ away)
    return (np.linalg.slogdet(inverse)[1] - np.linalg.slogdet(squares)[1] - left) / 2


@given(st.integers(4, 24), st.integers(0, 2), st.integers(0, 2**32 - 1))
def test_the_likelihood_is_that_of_all_correlations_together(number, covariates, seed):
    rng = np.random.default_rng(seed)
    d = rng.normal(1, 10 ** rng.uniform(-6, 3), number)
    x = rng.permutation([-1.0, 2.0, *rng.choice([-2, 1], number - 2)])
    columns = ([], [x], [np.ones(number), x])[covariates]
    expected = np.array([densely(d, columns, share) for share in STRENGTHS])
    shown = likelihood(d, *columns)
    assert shown - shown[0] == pytest.approx(expected - expected[0], abs=1e-6)
    likely = STRENGTHS[expected >= expected.max() + math.log(LIKELY) - 1e-9]
    assert float(strongest(shown)) == pytest.approx(likely.max(), abs=0.011)
    assert likelihood(np.stack([d, d[::-1]]), *(np.stack([one, one[::-1]]) for one in columns))[1] == pytest.approx(
        shown - shown[0] + likelihood(d[::-1], *(one[::-1] for one in columns))[0]
    )


def test_nothing_is_learned_from_differences_without_spread_or_from_covariates_without_any():
    d = series(0.5, 12)
    assert not likelihood(np.full(8, 0.25), 1.0).any()
    assert not likelihood([0.25], [1]).any()
    assert likelihood(d, 1.0, np.zeros(12)) == pytest.approx(likelihood(d, 1.0))
    assert likelihood(d, 1.0, np.full(12, 2.0)) == pytest.approx(likelihood(d, 1.0)), "a second mean"
    assert np.ptp(likelihood([0.1, 0.7], 1.0)) == pytest.approx(0.0, abs=1e-12), "two blocks and an unknown mean"


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.85])
def test_a_long_series_shows_its_strength(share):
    assert strength(blocks_of(series(share, 4000))) == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 1.0, 1.3), (0.8, 1.5, 4.9)])
def test_the_variants_own_blocks_count(share, low, high):
    spec = make_spec(design__blocks={"count": 40})
    d, plan = series(share, 40, 3) / 300, make_plan(spec)
    quiet = calibrate(OWN, blocks_of(series(0.0, 6, 7)))
    receipts = [
        make_receipt(plan, block, arm, tokens_per_s=5000 * math.exp(d[block.index] if arm == "psiv-on" else 0.0))
        for block in plan.blocks
        for arm in block.order
    ]
    circumstances = Circumstances(admission=Admission(calibrations=(quiet,), refused_because=None))
    assert low < judge(plan, spec, receipts, circumstances).variants[0].primary.widened < high
    assert judge(plan, spec, receipts, CALIBRATED).variants[0].primary.widened == 1.0, "noise without dependence"


def test_variants_count_as_one_series():
    alone, twice = likelihood(series(0.7, 10, 1), 1.0), likelihood(series(0.7, 10, 2), 1.0)
    (device,) = dependence_of([calibrate(OWN, blocks_of(series(0.0, 6)))])
    assert strength_of([device], [alone, twice]) == float(strongest(device, (alone + twice) / 2))
    assert strength_of([device], [alone, alone]) == strength_of([device], [alone])
    assert strength_of([], [alone]) == 0.0


@given(st.floats(0, 0.9), st.integers(4, 40), st.integers(0, 2**32 - 1))
def test_blocks_that_show_a_dependence_count_alone_and_others_beside_the_aa_blocks(share, number, seed):
    own, aa = likelihood(series(share, number, seed), 1.0), likelihood(series(0.0, 20, seed + 1))
    likely = STRENGTHS[own + aa >= (own + aa).max() + math.log(LIKELY)].max()
    alone = STRENGTHS[own >= own.max() + math.log(LIKELY)].max()
    shows = math.exp(own[0] - own.max()) < 0.15
    assert float(strongest(aa, own)) == (max(likely, alone) if shows else likely)


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


def test_opposite_neighbours_and_blocks_of_different_ablations_widen_little():
    assert strength(blocks_of(np.array([1.0, -1.0, -1.0, 1.0] * 5))) < 0.2
    assert dependence_of([calibrate(OWN, blocks_of(np.zeros(20)))]) == ()
    assert strength_of(dependence_of([])) == 0.0
    singles = [block for n in range(20) for block in blocks_of(np.array([n - 9.5]), f"abl_{n}")]
    assert np.ptp(dependence_of([calibrate(OWN, singles)])[0]) == 0.0, "no neighbours, no evidence"


def test_neighbours_are_those_of_one_ablation():
    rise, fall = (blocks_of(series(0.9, 12, seed), f"abl_{seed}") for seed in (1, 2))
    mixed = [block for pair in zip(rise, fall, strict=True) for block in pair]
    assert strength(mixed) == strength([*rise, *fall])


@pytest.mark.parametrize("number", [6, 20])
def test_equal_arms_that_differ_throughout_are_dependent(number):
    """Without the effect of places their mean is zero, so one side in every block is no accident."""
    d = np.random.default_rng(number).normal(0, 1, number)
    assert strength(blocks_of(d + 4)) == STRENGTHS[-1]
    by_place = d + 4 * np.array([block.place for block in blocks_of(d)])
    assert strength(blocks_of(by_place)) == pytest.approx(strength(blocks_of(d)), abs=0.011)


@pytest.mark.parametrize("blocks", [6, 10, 20])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8])
def test_the_widened_error_is_the_spread_of_means(share, blocks):
    """On average over series; so is the variance that they show, of which the error is made."""
    drawn = np.array([series(share, blocks, seed) for seed in range(8000)])
    shown = drawn.var(axis=1, ddof=1).mean() / blocks
    assert widening(share, blocks) ** 2 * shown == pytest.approx(drawn.mean(axis=1).var(), rel=0.06)


def test_a_verdict_is_widened_by_the_most_dependent_of_its_devices_and_says_so():
    receipts = make_receipts(PLAN, {"psiv-on": 1.01})
    quiet, slow = blocks_of(np.array([1.0, -1.0, -1.0, 1.0] * 5)), blocks_of(series(0.9, 30, 3))
    other = OWN.model_copy(update={"device_serial": "two"})
    known = tuple(calibrate(key, blocks) for key, blocks in ((OWN, quiet), (other, slow)))
    alone, both = (
        judge(PLAN, SPEC, receipts, Circumstances(admission=Admission(calibrations=own, refused_because=None)))
        for own in (known[:1], known)
    )
    narrow, wide = alone.variants[0].primary, both.variants[0].primary
    assert narrow.widened < 1.3 < 2 < wide.widened < widening(0.9, 6) + 0.001
    assert wide.delta_pct == narrow.delta_pct
    factor = wide.widened / narrow.widened
    assert log(wide.ci_high_pct) - log(wide.delta_pct) == pytest.approx(
        factor * (log(narrow.ci_high_pct) - log(narrow.delta_pct))
    )
    assert log(wide.mde_pct) == pytest.approx(factor * log(narrow.mde_pct))
    assert wide.p_holm > narrow.p_holm
    (note,) = [note for note in both.variants[0].notes if "autocorrelation" in note]
    assert f"{wide.widened:.2f} times as wide" in note


def log(percent: float) -> float:
    return math.log1p(percent / 100)
