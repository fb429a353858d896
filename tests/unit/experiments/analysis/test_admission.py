"""Admission: each reason to refuse words, one at a time, from a case that is admitted."""

import re

import pytest

from ablate.experiments.analysis.noise.admission import admission_of
from ablate.experiments.analysis.noise.calibrate import calibrate, calibrations_of, key_of
from ablate.experiments.design.plan import make_plan
from ablate.experiments.outcomes import Outcome
from ablate.experiments.records.calibration import Ledger
from tests.calibrations import aa_spec, noisy_blocks
from tests.factories import make_receipt, make_receipts, make_spec

SPEC = make_spec()
PLAN = make_plan(SPEC)
RECEIPTS = make_receipts(PLAN)
OWN = key_of(SPEC, RECEIPTS[0])


def admission(*known, receipts=RECEIPTS):
    return admission_of(SPEC, receipts, known, ledger=Ledger(), mended_by="ablate aa cpu --like it")


def known(number=20, key=OWN, **changes):
    return calibrate(key, noisy_blocks(number, clock_mhz=None, **changes))


def test_twenty_quiet_blocks_of_its_own_key_admit():
    answer = admission(known())
    assert answer.refused_because is None
    assert answer.mended_by is None
    assert answer.calibrations == (known(),)


def test_the_blocks_of_an_aa_ablation_admit_the_ablation_that_they_are_like():
    aa = aa_spec(SPEC)
    calibrations = calibrations_of(make_plan(aa), aa, make_receipts(make_plan(aa), seed=3))
    assert admission(*calibrations).refused_because is None


@pytest.mark.parametrize(
    ("calibration", "reason"),
    [
        (known(5), "has 5 A/A blocks; 6 allow a verdict"),
        (known(20, sd=0.0), "no noise at all"),
        (known(20, started_at="2026-10-20T12:00:00+00:00"), "31 days away; allowed: 30"),
        (known(20, key=OWN.model_copy(update={"device_serial": "x"})), "the nearest ones have another device$"),
        (known(20, key=OWN.model_copy(update={"software_digest": "x"})), "have other code or versions$"),
        (known(20, key=OWN.model_copy(update={"shape_digest": "x"})), "have another shape$"),
        (known(20, key=OWN.model_copy(update={"estimator_digest": "x"})), "have another estimator or window$"),
        (known(20, key=OWN.model_copy(update={"recipe": "x"})), "have another recipe$"),
        (known(20, key=OWN.model_copy(update={"node_class": "h200"})), "no A/A blocks for cpu"),
        (
            calibrate(
                OWN, [b.model_copy(update={"difference": b.difference + 0.01}) for b in noisy_blocks(clock_mhz=None)]
            ),
            r"differ from zero by \+1.00 %",
        ),
        (
            calibrate(OWN, [*noisy_blocks(), *noisy_blocks(10, sd=0.02, source="sentinel", ablation="abl_2")]),
            "sentinel blocks are noisier",
        ),
    ],
)
def test_each_reason_is_said_with_the_command_that_mends_it(calibration, reason):
    answer = admission(calibration)
    assert re.search(reason, answer.refused_because)
    assert answer.mended_by == "ablate aa cpu --like it"


@pytest.mark.parametrize(("number", "admitted"), [(5, False), (6, True)])
def test_six_blocks_admit(number, admitted):
    assert (admission(known(number)).refused_because is None) is admitted


def test_nothing_known_and_nothing_measured():
    assert "no A/A blocks" in admission().refused_because
    failed = [make_receipt(PLAN, 0, "baseline", outcome=Outcome.OOM)]
    assert admission(known(), receipts=failed).refused_because == "no baseline was measured"


def test_a_clock_that_moved_refuses_and_one_that_did_not_does_not():
    def at(mhz):
        return [
            one.model_copy(update={"steps": tuple(step.model_copy(update={"clock_mhz": mhz}) for step in one.steps)})
            for one in RECEIPTS
        ]

    calibrated = calibrate(OWN, noisy_blocks(clock_mhz=1700.0))
    assert admission(calibrated, receipts=at(1684.0)).refused_because is None
    assert "moved by -1.2 %" in admission(calibrated, receipts=at(1680.0)).refused_because
    assert "moved by +1.2 %" in admission(calibrated, receipts=at(1720.0)).refused_because


def test_every_device_that_ran_needs_its_own():
    other = [
        make_receipt(PLAN, block, arm, environment={"device_serial": "two"})
        for block in (4, 5)
        for arm in PLAN.arm_by_name
    ]
    mixed = [one for one in RECEIPTS if one.ids.block_index < 4] + other
    answer = admission(known(), receipts=mixed)
    assert "cpu two" in answer.refused_because
    assert len(answer.calibrations) == 1
    both = admission(known(), known(20, key=key_of(SPEC, other[0])), receipts=mixed)
    assert (both.refused_because, len(both.calibrations)) == (None, 2)


def test_an_exact_metric_needs_no_calibration():
    exact = make_spec(verdict__primary={"metric": "peak_allocated_gib", "margin": "0%"})
    assert admission_of(exact, RECEIPTS, [], ledger=Ledger(), mended_by="").refused_because is None
