"""Which blocks count for which arm, whatever receipts are missing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate.experiments.analysis.evidence import WholeBlocks
from ablate.experiments.analysis.judge import judge
from ablate.experiments.outcomes import Decision, FailureClass, Outcome, VerdictWord
from ablate.experiments.records.circumstances import CALIBRATED
from ablate.experiments.records.receipts import Receipt
from tests.factories import make_plan, make_receipts, make_spec

SPEC = make_spec()
PLAN = make_plan(SPEC)
RECEIPTS = make_receipts(PLAN, sd=0.01)
PLACES = st.sets(st.tuples(st.integers(0, 5), st.sampled_from([arm.name for arm in PLAN.arms])))


def without(missing: set[tuple[int, str]]) -> list[Receipt]:
    return [receipt for receipt in RECEIPTS if (receipt.ids.block_index, receipt.arm) not in missing]


@given(PLACES)
def test_a_variant_has_the_blocks_where_it_and_the_baseline_are(missing: set[tuple[int, str]]) -> None:
    whole = WholeBlocks(PLAN, without(missing))
    base = {index for index in range(6) if (index, "baseline") not in missing}
    counted = set()
    for variant in PLAN.arms[1:]:
        expected = [index for index in sorted(base) if (index, variant.name) not in missing]
        pairs = whole.pairs(variant.name)
        assert [pair.block_index for pair in pairs] == expected
        assert {pair.variant.arm for pair in pairs} <= {variant.name}
        assert [pair.baseline.ids.block_index for pair in pairs] == expected
        assert [receipt.ids.block_index for receipt in whole.of(variant.name)] == expected
        counted |= set(expected)
    assert [block.index for block in whole.blocks] == sorted(counted)
    assert [receipt.ids.block_index for receipt in whole.of("baseline")] == sorted(counted)


def test_missing_variant_leaves_the_others_their_answer() -> None:
    everything = judge(PLAN, SPEC, RECEIPTS, CALIBRATED).variants
    variants = judge(PLAN, SPEC, without({(index, "psiv-on") for index in range(6)}), CALIBRATED).variants
    assert (variants[0].verdict, variants[0].decision) == (VerdictWord.INCONCLUSIVE, Decision.INCONCLUSIVE)
    assert "0 of 6 planned blocks counted" in variants[0].reason
    assert variants[1].primary is not None
    assert everything[1].primary is not None
    assert variants[1].primary.differences_pct == everything[1].primary.differences_pct


@pytest.mark.parametrize(
    ("outcome", "failure", "words"),
    [
        (Outcome.TIMEOUT, FailureClass.TIMEOUT, "1 of 6 trials took too long: the trial took longer than 60 s"),
        (Outcome.FAILED, FailureClass.NO_RECEIPT, "1 of 6 trials failed: the trial took longer than 60 s"),
    ],
)
def test_one_arm_that_ends_badly_has_its_verdict_and_the_others_theirs(
    outcome: Outcome, failure: FailureClass, words: str
) -> None:
    broke = {
        "outcome": outcome,
        "failure_class": failure,
        "summary": None,
        "message": "the trial took longer than 60 s",
    }
    place = (2, "psiv-on")
    receipts = [r.model_copy(update=broke) if (r.ids.block_index, r.arm) == place else r for r in RECEIPTS]
    variants = judge(PLAN, SPEC, receipts, CALIBRATED).variants
    assert (variants[0].verdict, variants[0].decision) == (VerdictWord(outcome.value), Decision.REJECT)
    assert variants[0].reason == words
    assert variants[1].primary is not None
    assert variants[1].primary.blocks == 6
