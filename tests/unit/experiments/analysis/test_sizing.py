"""Sizing: what a design sees at the measured noise, against simulated t tests; and which designs are refused."""

import math

import numpy as np
import pytest
from scipy import stats

from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.noise.calibrate import calibrate, key_of
from ablate.experiments.analysis.sizing import budget_problems, size_by_seeds, size_of, sizing_problems, spreads_in
from ablate.experiments.analysis.statistics import dependence_of, strength_of, widening
from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.design.plan import make_plan
from ablate.experiments.design.power import PLANNED_POWER, adopted_from, alpha_of
from ablate.experiments.records.circumstances import CALIBRATED
from tests.calibrations import aa_spec, make_block, noisy_blocks
from tests.factories import make_receipt, make_spec

SPEC = make_spec()
OWN = key_of(SPEC, make_receipt(make_plan(SPEC), 0, "baseline"))


def alternating(blocks):
    """Return A/A blocks with the same differences, small and large ones by turns: the contrary of dependence."""
    d = sorted(block.difference for block in blocks)
    turns = [value for pair in zip(d, reversed(d), strict=True) for value in pair][: len(d)]
    return [block.model_copy(update={"difference": one, "place": 1}) for block, one in zip(blocks, turns, strict=True)]


def sized(spec=SPEC, *, sd=0.003, number=20, key=OWN):
    return size_of(spec, make_plan(spec), [calibrate(key, alternating(noisy_blocks(number, sd=sd)))])


def test_the_detectable_effect_is_found_in_80_of_100_simulated_ablations():
    size = sized(make_spec(design__blocks={"count": 12}))
    effect, sd = math.log1p(size.mde_pct / 100), size.sd_upper_pct / 100
    rng, level = np.random.default_rng(0), alpha_of(1) / 2  # two variants
    place = np.tile([-1.0, 1.0], 6)
    d = effect + rng.normal(0, sd, (6000, 12))
    slope = (d * place).sum(axis=1) / 12
    rest = d - d.mean(axis=1, keepdims=True) - slope[:, None] * place
    error = np.sqrt((rest**2).sum(axis=1) / 10 / 12)
    power = np.mean(np.abs(d.mean(axis=1) / error) > stats.t.ppf(1 - level / 2, 10))
    assert power == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize("changes", [{}, {"verdict__primary": {"metric": "tokens_per_s", "margin": "0.5%"}}])
def test_the_blocks_that_it_asks_for_prove_the_gain_beyond_the_margin_with_planned_power(changes):
    size = sized(make_spec(**changes), sd=0.008)
    sd, level = size.sd_upper_pct / 100, alpha_of(1) / 2
    assert size.aim_pct == (1.0 if changes else 1.5), "twice the margin, where the threshold is the margin"
    distance = math.log1p(size.aim_pct / 100) - math.log1p(0.005)
    enough, fewer = (_power(blocks, distance, sd, level) for blocks in (size.blocks_needed, size.blocks_needed - 1))
    assert fewer < PLANNED_POWER <= enough
    assert size.blocks_needed > 6
    assert sized(sd=5.0).blocks_needed is None


def test_a_gain_is_adopted_as_often_as_planned_in_simulated_ablations():
    rng = np.random.default_rng(20261126)
    for _ in range(40):
        blocks, sd = int(rng.integers(6, 40)), float(10 ** rng.uniform(-3, -1))
        margin, level = float(10 ** rng.uniform(-4, -1)), float(10 ** rng.uniform(-4, -1.2))
        threshold = margin * float(rng.choice([1.0, 1.5, 5.0]))
        gain = adopted_from(blocks, sd, margin=margin, threshold=threshold, level=level)
        estimate = rng.normal(gain, sd / math.sqrt(blocks), 20_000)
        error = sd * np.sqrt(rng.chisquare(blocks - 2, 20_000) / (blocks - 2) / blocks)
        beyond = estimate - stats.t.ppf(1 - level / 2, blocks - 2) * error > margin
        assert np.mean(beyond & (estimate >= threshold)) == pytest.approx(0.8, abs=0.015)
    assert adopted_from(6, 0.0, margin=0.005, threshold=0.015, level=0.04) == 0.015


def _power(blocks, effect, sd, level):
    """Power of a t test with one covariate, from the noncentral t distribution of scipy.stats."""
    critical = stats.t.ppf(1 - level / 2, blocks - 2)
    return stats.nct.sf(critical, blocks - 2, effect / sd * math.sqrt(blocks))


@pytest.mark.parametrize("field", ["device_serial", "software_digest"])
def test_any_device_and_code_of_the_workload_counts_and_the_noisiest_decides(field):
    quiet, loud = noisy_blocks(sd=0.001), noisy_blocks(sd=0.01)
    other = OWN.model_copy(update={field: "x"})
    size = size_of(SPEC, make_plan(SPEC), [calibrate(OWN, quiet), calibrate(other, loud)])
    assert size.calibration == calibrate(other, loud).digest


@pytest.mark.parametrize("field", ["node_class", "recipe", "shape_digest", "estimator_digest"])
def test_another_workload_says_nothing(field):
    assert sized(key=OWN.model_copy(update={field: "x"})) is None


def test_too_few_blocks_exact_metrics_and_calibrations_are_not_sized():
    assert sized(number=19) is None
    assert sized(make_spec(verdict__primary={"metric": "peak_allocated_gib", "margin": "0%"})) is None
    assert sized(aa_spec(SPEC)) is None


def loss_ablation(seeds: int, sd: float) -> Verdict:
    """Return the verdict of an ablation whose validation losses differ by `sd` nats between seeds."""
    spec = make_spec(
        verdict__primary={"metric": "loss_val", "margin": "0.02 nats"},
        design={"seeds": seeds, "blocks": {"count": seeds}},
    )
    plan, rng = make_plan(spec), np.random.default_rng(3)
    receipts = [
        make_receipt(plan, block, arm, loss_val=3.0 + float(rng.normal(0, sd / 2**0.5)))
        for block in plan.blocks
        for arm in block.order
    ]
    return judge(plan, spec, receipts, CALIBRATED)


def test_a_loss_is_sized_by_the_widest_spread_of_seeds_in_earlier_ablations():
    primary = {"metric": "loss_val", "margin": "0.02 nats", "adopt_if": "0.05 nats"}
    spec = make_spec(verdict__primary=primary, design={"seeds": 10, "blocks": {"count": 10}})
    wide, narrow = (
        list(spreads_in(name, loss_ablation(12, sd), "loss_val")) for name, sd in (("w", 0.05), ("n", 0.01))
    )
    assert [len(wide), len(narrow)] == [2, 2]
    assert list(spreads_in("w", loss_ablation(12, 0.05), "loss_final")) == []
    size = size_by_seeds(spec, make_plan(spec), [*narrow, *wide])
    one = max(wide, key=lambda spread: spread.sd_pct)
    assert (size.calibration, size.earlier, size.baseline) == (None, "w", one.baseline)
    upper = one.sd_pct * math.sqrt(11 / stats.chi2.ppf(0.05, 11))
    assert size.sd_upper_pct == pytest.approx(upper)
    level = alpha_of(1) / 2
    assert _power(10, size.mde_pct, upper, level) == pytest.approx(0.8, abs=0.01)
    assert size.proved_pct == pytest.approx(size.mde_pct + 2 / one.baseline)
    distance = 3 / one.baseline
    if size.blocks_needed is not None:
        assert _power(size.blocks_needed, distance, upper, level) >= PLANNED_POWER
    assert size_by_seeds(spec, make_plan(spec), narrow).blocks_needed < 64
    assert size_by_seeds(spec, make_plan(spec), []) is None
    assert sizing_problems(spec, size) == [], "another variant may scatter less"


def test_a_design_that_cannot_prove_adopt_if_is_refused_unless_it_says_that_it_knows():
    (problem,) = sizing_problems(SPEC, sized(sd=0.02))
    assert problem.pointer == "#/design/blocks"
    assert problem.detail.startswith("6 blocks prove a gain of ")
    assert "the rule adopts from 1.5 %" in problem.detail
    assert "up to 2.39 %" in problem.detail
    assert "over windows of 4 timed steps" in problem.detail
    assert problem.hint.split(" blocks ")[0].isdigit()
    assert "quieter machine" in problem.hint
    assert sizing_problems(SPEC, sized(sd=0.002)) == []
    assert sizing_problems(SPEC, None) == []
    assert sizing_problems(make_spec(design__underpowered=True), sized(sd=0.02)) == []
    unstated = make_spec(verdict__primary={"metric": "tokens_per_s", "margin": "0.5%"})
    assert sizing_problems(unstated, sized(unstated, sd=0.02)) == []
    at_margin = make_spec(verdict__primary={"metric": "tokens_per_s", "margin": "0.5%", "adopt_if": "0.5%"})
    (problem,) = sizing_problems(at_margin, sized(at_margin, sd=0.008))
    assert "the rule adopts from 0.5 %, so they are for 1 %: " in problem.detail
    assert "underpowered" not in SPEC.model_dump(mode="json")["design"]


def test_neighbouring_blocks_that_resemble_each_other_ask_for_more_blocks():
    d = [0.004, 0.003, 0.004, 0.002, 0.001, -0.002, -0.004, -0.003, -0.004, -0.001] * 2
    blocks = [make_block(index, difference=value) for index, value in enumerate(d)]
    plan = make_plan(SPEC)
    calibrations = [calibrate(OWN, own) for own in (blocks, alternating(blocks))]
    dependent, independent = (size_of(SPEC, plan, [one]) for one in calibrations)
    assert dependent.sd_upper_pct == pytest.approx(independent.sd_upper_pct)
    factor, least = (widening(strength_of(dependence_of([one])), len(plan.blocks)) for one in calibrations)
    assert factor > 1.5
    assert least == 1.0
    assert math.log1p(dependent.mde_pct / 100) == pytest.approx(factor * math.log1p(independent.mde_pct / 100))
    assert dependent.blocks_needed > independent.blocks_needed


def test_a_number_of_blocks_beyond_the_budget_is_refused_with_the_noise_that_asks_for_it():
    size = sized(sd=0.02)
    (problem,) = budget_problems(SPEC, size, 196.04)
    assert problem.pointer == "#/limits/device_minutes"
    assert "about 196.0 device minutes, but limits.device_minutes allows 180" in problem.detail
    assert "standard deviation of up to" in problem.detail
    assert "a quieter machine" in problem.hint
    assert [budget_problems(SPEC, size, minutes) for minutes in (180.0, None)] == [[], []]
    assert budget_problems(SPEC, None, 1000.0) == []
