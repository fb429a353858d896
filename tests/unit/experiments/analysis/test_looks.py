"""Looks: what each may spend, when an ablation stops, and that a verdict is earned only at a look."""

from typing import Any

import numpy as np
import pytest
from scipy import stats

from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.looks import at_look
from ablate.experiments.analysis.verdicts import Cause
from ablate.experiments.design.power import alpha_of
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.outcomes import FailureClass, VerdictWord
from ablate.experiments.records.circumstances import CALIBRATED, UNCALIBRATED, AttemptRecord
from ablate.experiments.records.receipts import Receipt
from tests.factories import make_plan, make_receipt, make_receipts, make_spec

LOOKS = (6, 10, 14, 20)
SPEC = make_spec(design__blocks={"looks": list(LOOKS)})
PLAN = make_plan(SPEC)


def receipts(blocks: int, **changes: Any) -> list[Receipt]:
    return [receipt for receipt in make_receipts(PLAN, **changes) if receipt.ids.block_index < blocks]


def test_an_ablation_stops_where_every_variant_has_an_answer() -> None:
    look = at_look(PLAN, SPEC, receipts(6, speeds={"psiv-on": 1.05}, sd=0.0004), CALIBRATED, 0)
    assert not look.go_on
    assert look.reason == "after 6 blocks: 'psiv-on' better, 'chunk-32' same"


def test_want_of_calibration_is_not_mended_by_more_blocks() -> None:
    assert not at_look(PLAN, SPEC, receipts(6, speeds={"psiv-on": 1.05}, sd=0.0004), UNCALIBRATED, 0).go_on


def test_an_ablation_goes_on_while_an_answer_is_likely() -> None:
    look = at_look(PLAN, SPEC, receipts(6, speeds={"psiv-on": 1.02}, sd=0.006), CALIBRATED, 0)
    assert look.go_on
    assert "chance of an answer" in look.reason


def test_an_ablation_stops_where_more_blocks_are_futile() -> None:
    look = at_look(PLAN, SPEC, receipts(14, sd=0.05), CALIBRATED, 2)
    assert not look.go_on
    assert look.reason.endswith("more blocks are futile")


def test_spreads_that_differ_may_look_alike_after_more_blocks() -> None:
    rng = np.random.default_rng(5)
    noise = {"psiv-on": 0.01, "baseline": 2e-4, "chunk-32": 2e-4}
    speed = {"psiv-on": 1.05}
    rows = [
        make_receipt(PLAN, b, a, tokens_per_s=float(5000 * speed.get(a, 1) * np.exp(rng.normal(0, noise[a]))))
        for b in PLAN.blocks[:6]
        for a in b.order
    ]
    assert judge(PLAN, SPEC, rows, CALIBRATED).variants[0].cause is Cause.SPREADS
    assert at_look(PLAN, SPEC, rows, CALIBRATED, 0).go_on


def test_a_look_ignores_blocks_beyond_it() -> None:
    early = at_look(PLAN, SPEC, receipts(10, speeds={"psiv-on": 1.02}, sd=0.006), CALIBRATED, 0)
    assert early == at_look(PLAN, SPEC, receipts(6, speeds={"psiv-on": 1.02}, sd=0.006), CALIBRATED, 0)


def test_missing_blocks_and_reruns_are_not_waited_for() -> None:
    some = [r for r in receipts(6, sd=0.006) if r.ids.block_index != 2]
    assert not at_look(PLAN, SPEC, some, CALIBRATED, 0).go_on
    broken = AttemptRecord(
        block_index=1, number=1, failure_class=FailureClass.TIMEOUT, arm="baseline", message="stopped", node="n"
    )
    quick = receipts(6, speeds={"psiv-on": 1.05}, sd=0.0004)
    assert not at_look(PLAN, SPEC, quick, CALIBRATED.model_copy(update={"attempts": (broken,)}), 0).go_on


@pytest.mark.parametrize("look", range(4))
def test_a_verdict_at_a_look_holds_at_the_level_of_all_looks(look: int) -> None:
    verdict = judge(PLAN, SPEC, receipts(LOOKS[look], speeds={"psiv-on": 1.05}, sd=0.0004), CALIBRATED)
    (compared, _) = [variant.primary for variant in verdict.variants]
    assert verdict.variants[0].verdict is VerdictWord.BETTER
    assert compared is not None
    assert compared.alpha == alpha_of(1)
    alone = stats.ttest_1samp(np.log1p(np.array(compared.differences_pct) / 100), 0).pvalue
    assert compared.p_holm > alone


@pytest.mark.parametrize("blocks", [5, 7, 11, 19])
def test_between_looks_no_verdict_is_earned(blocks: int) -> None:
    verdict = judge(PLAN, SPEC, receipts(blocks, speeds={"psiv-on": 1.2}, sd=0.0004), CALIBRATED)
    due = next(look for look in LOOKS if look > blocks)
    assert {variant.measured for variant in verdict.variants} == {VerdictWord.INCONCLUSIVE}
    assert f"{blocks} of {due} planned blocks counted; missing data fails" in verdict.variants[0].reason


def test_the_first_blocks_count_and_no_chosen_ones() -> None:
    chosen = [r for r in receipts(20, speeds={"psiv-on": 1.2}) if r.ids.block_index in {0, 1, 2, 3, 4, 9}]
    assert judge(PLAN, SPEC, chosen, CALIBRATED).variants[0].measured is VerdictWord.INCONCLUSIVE


def test_a_fixed_count_is_one_look() -> None:
    spec: AblationSpec = make_spec()
    assert spec.design.blocks.schedule == (6,)
    assert not at_look(make_plan(spec), spec, [], CALIBRATED, 0).go_on
