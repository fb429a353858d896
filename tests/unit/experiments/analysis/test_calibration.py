"""A/A blocks to a calibration: every number against an independent computation, over random draws."""

import math
from datetime import datetime
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from ablate.experiments.analysis.noise.calibrate import (
    aa_blocks_of,
    calibrate,
    calibrate_all,
    calibrations_of,
    join_calibrations,
    key_of,
)
from ablate.experiments.design.plan import controlled, make_plan
from ablate.experiments.outcomes import Outcome
from ablate.experiments.reporting import wording
from tests.calibrations import KEY, aa_spec, make_block, noisy_blocks
from tests.factories import SPEC, make_receipt, make_receipts, make_spec


@pytest.mark.parametrize("seed", range(25))
def test_every_number_is_that_of_an_independent_computation(seed):
    rng = np.random.default_rng(seed)
    number, sd = int(rng.integers(3, 80)), float(rng.uniform(0.0005, 0.2))
    minutes = np.sort(rng.uniform(0, 600, number))
    d, place, rate = rng.normal(0.001, sd, number), rng.choice([-1, 1], number), rng.normal(10, 0.1, number)
    blocks = [
        make_block(i, minutes=minutes[i], difference=d[i], place=int(place[i]), log_rate=rate[i]) for i in range(number)
    ]
    calibration = calibrate(KEY, [blocks[i] for i in rng.permutation(number)])
    assert calibration.samples == tuple(blocks)
    assert calibration.sd_pct == pytest.approx(100 * np.std(d, ddof=1))
    assert calibration.mean_pct == pytest.approx(100 * d.mean())
    factor = math.sqrt((number - 1) / stats.chi2.ppf(0.05, number - 1))
    assert calibration.sd_upper_pct == pytest.approx(100 * np.std(d, ddof=1) * factor)
    later_minus_earlier = [one if where > 0 else -one for one, where in zip(d, place, strict=True)]
    assert calibration.position_effect_pct == pytest.approx(100 * np.mean(later_minus_earlier))
    assert calibration.drift_pct_per_hour == pytest.approx(100 * np.polyfit(minutes / 60, rate, 1)[0], abs=1e-6)
    assert calibration.largest_z == pytest.approx(np.max(np.abs(stats.zscore(d, ddof=1))))
    assert calibration.autocorrelation == pytest.approx(_lag_one(d))


def _lag_one(d):
    mean = sum(d) / len(d)
    return sum((a - mean) * (b - mean) for a, b in pairwise(d)) / sum((a - mean) ** 2 for a in d)


def test_drift_is_taken_within_ablations_not_between_days():
    blocks = [make_block(i, minutes=m, log_rate=10 + 0.01 * m / 60) for i, m in enumerate([0, 10, 20, 30])]
    later = [
        make_block(i, minutes=90_000 + m, log_rate=12 + 0.01 * m / 60, ablation="abl_2")
        for i, m in enumerate([0, 10, 20])
    ]
    quiet = calibrate(KEY, [*blocks, *later])
    assert (quiet.drift_pct_per_hour, wording.drift(quiet)) == (0, ""), "blocks without noise measured nothing"
    noisy = [one.model_copy(update={"difference": 0.001 * (-1) ** one.block_index}) for one in (*blocks, *later)]
    drifting = calibrate(KEY, noisy)
    assert drifting.drift_pct_per_hour == pytest.approx(1.0)
    assert wording.drift(drifting) == "+0.50\N{NO-BREAK SPACE}% in 30\N{NO-BREAK SPACE}min"


def test_noisier_sentinel_blocks_are_found_and_equal_ones_are_not():
    base = noisy_blocks(30, sd=0.003, seed=1)
    same = noisy_blocks(20, sd=0.003, seed=2, source="sentinel", ablation="abl_2")
    loud = noisy_blocks(20, sd=0.009, seed=2, source="hidden", ablation="abl_2")
    assert calibrate(KEY, base).variance_p is None
    assert calibrate(KEY, [*base, *same]).variance_p > 0.05
    assert calibrate(KEY, [*base, *loud]).variance_p < 1e-6


def test_blocks_come_from_the_receipts_of_both_equal_arms():
    spec = aa_spec(blocks=8)
    plan = make_plan(spec)
    receipts = make_receipts(plan, {"repeat": 1.01}, sd=0.002)
    pairs = list(aa_blocks_of(plan, spec, receipts))
    assert [block.block_index for _, block in pairs] == list(range(8))
    by_place = {(one.ids.block_index, one.arm): one for one in receipts}
    for key, block in pairs:
        baseline, repeat = (by_place[block.block_index, arm] for arm in ("baseline", "repeat"))
        assert key == key_of(spec, baseline)
        assert block.receipts == (baseline.digest, repeat.digest)
        assert block.difference == pytest.approx(math.log(repeat.summary.tokens_per_s / baseline.summary.tokens_per_s))
        assert block.place == plan.blocks[block.block_index].order.index("repeat") * 2 - 1
        assert datetime.fromisoformat(block.started_at) <= datetime.fromisoformat(repeat.started_at)
    (made,) = calibrations_of(plan, spec, receipts)
    assert made.blocks == 8
    assert made.mean_pct == pytest.approx(1.0, abs=0.3)


def test_an_ordinary_ablation_and_broken_blocks_give_nothing():
    spec = make_spec()
    assert list(aa_blocks_of(make_plan(spec), spec, make_receipts(make_plan(spec)))) == []
    aa = aa_spec(blocks=6)
    plan = make_plan(aa)
    receipts = [one for one in make_receipts(plan) if one.ids.block_index > 1 or one.arm == "baseline"]
    lost = make_receipt(plan, 0, "repeat", outcome=Outcome.FAILED)
    other_code = receipts[-1].model_copy(
        update={"digests": receipts[-1].digests.model_copy(update={"code": "sha256:x"})}
    )
    pairs = list(aa_blocks_of(plan, aa, [*receipts[:-1], other_code, lost]))
    assert [block.block_index for _, block in pairs] == [2, 3, 4]


def test_the_key_changes_with_everything_but_gates_and_seed():
    def key(environment=None, seed_block=0, arm="baseline", **changes):
        spec = make_spec(**changes)
        return key_of(spec, make_receipt(make_plan(spec), seed_block, arm, environment=environment or {}))

    base = key()
    assert key(seed_block=1) == base
    assert key(arm="psiv-on") == base
    assert key(workload__steps={**SPEC["workload"]["steps"], "val_rows": 4}) == base
    assert key(verdict__primary={"metric": "step_s", "margin": "2%"}) == base
    changed = {
        "device_serial": key({"device_serial": "123"}),
        "shape_digest": key(workload__overrides={"seq_len": 128}),
        "estimator_digest": key(workload__steps={**SPEC["workload"]["steps"], "warmup": 2}),
        "software_digest": key({"versions": {"torch": "2.14"}}),
        "node_class": key({"node_class": "h200"}),
    }
    for name, other in changed.items():
        assert [field for field in type(base).model_fields if getattr(base, field) != getattr(other, field)] == [name]


def test_calibrations_of_one_key_are_joined_and_no_block_counts_twice():
    blocks = noisy_blocks(12)
    halves = [calibrate(KEY, blocks[:6]), calibrate(KEY, blocks[4:])]
    other = calibrate(KEY.model_copy(update={"device_serial": "two"}), noisy_blocks(5))
    joined = join_calibrations([*halves, other])
    assert {(one.key.device_serial, one.blocks) for one in joined} == {("one", 12), ("two", 5)}
    assert next(one for one in joined if one.blocks == 12) == calibrate(KEY, blocks)
    assert calibrate_all([(KEY, make_block())]) == ()


def test_the_control_of_an_ablation_is_its_baseline_once_more_and_no_variant():
    spec = make_spec(variants={"control": {"gates": {"psiv_cache": True}}})
    plan = controlled(spec, make_plan(spec))
    assert [(arm.name, arm.role) for arm in plan.arms] == [
        ("baseline", "baseline"),
        ("control", "variant"),
        ("control-2", "control"),
    ]
    assert plan.control.digest == plan.baseline.digest
    assert [arm.name for arm in plan.variants] == ["control"]
    assert make_plan(spec).control is None
    assert all(set(block.order) == {"baseline", "control", "control-2"} for block in plan.blocks)
    pairs = list(aa_blocks_of(plan, spec, make_receipts(plan, sd=0.002)))
    assert [block.source for _, block in pairs] == ["hidden"] * 6
