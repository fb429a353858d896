"""What withholds or decides beside the numbers: stalls, spreads, reruns, earlier askings, exact requirements."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ablate.experiments.analysis.judge import _reruns_by, judge
from ablate.experiments.analysis.noise.calibrate import calibrate
from ablate.experiments.analysis.verdicts import Cause, VariantVerdict
from ablate.experiments.design.power import alpha_of
from ablate.experiments.outcomes import AblationState, Decision, FailureClass, Required, VerdictWord
from ablate.experiments.records.circumstances import (
    CALIBRATED,
    Admission,
    AttemptRecord,
    Circumstances,
    EarlierAblation,
    Family,
)
from ablate.experiments.records.receipts import Receipt
from ablate.model.measurements import Step
from ablate.service.store.questions.circumstances import was_spoiled
from tests.calibrations import KEY, noisy_blocks
from tests.factories import GIB, clocked, make_plan, make_receipt, make_receipts, make_spec

SPEC = make_spec(design__blocks={"count": 8}, workload__steps={"warmup": 1, "timed": 25, "val_rows": 2})
PLAN = make_plan(SPEC)
QUIET = {"sd": 0.001}
EQUAL = make_receipts(PLAN, **QUIET)


def judged(receipts: list[Receipt], circumstances: Circumstances = CALIBRATED) -> VariantVerdict:
    return judge(PLAN, SPEC, receipts, circumstances).variants[0]


def slowed(receipts: list[Receipt], factor: Callable[[Step], float], arm: str = "psiv-on") -> list[Receipt]:
    """Return `receipts` with the steps of one arm longer."""

    def steps(receipt: Receipt) -> tuple[Step, ...]:
        return clocked([s.model_copy(update={"seconds": s.seconds * factor(s)}) for s in receipt.steps], load_s=0.5)

    return [make_receipt(PLAN, r.ids.block_index, r.arm, steps=steps(r)) if r.arm == arm else r for r in receipts]


@pytest.mark.parametrize("others", [1.0, math.exp(-0.015)])
def test_two_stalls_of_25_steps_are_named_and_not_dropped(others: float) -> None:
    stalled = slowed(make_receipts(PLAN, **QUIET), lambda s: 3.0 if s.index in (7, 19) else others)
    variant = judged(stalled)
    assert (variant.verdict, variant.measured, variant.cause) == (
        VerdictWord.INCONCLUSIVE,
        VerdictWord.INCONCLUSIVE,
        Cause.STALLS,
    )
    assert variant.reason.startswith("stalls differ: -1")
    assert variant.primary is not None
    truth = 100 * (25 / ((23 * others) + 6) - 1)
    assert variant.primary.delta_pct == pytest.approx(truth, abs=0.3)
    assert variant.primary.by_median_pct == pytest.approx(100 * (1 / others - 1), abs=0.3)
    assert variant.primary.outlier_steps == (0, 16)


def test_outlier_steps_of_one_arm_are_named_even_when_the_total_hardly_moves() -> None:
    variant = judged(slowed(make_receipts(PLAN, **QUIET), lambda s: 1.08 if s.index == 11 else 1.0))
    assert (variant.verdict, variant.cause) == (VerdictWord.SAME, None)
    named = "8 outlier steps against the baseline's 0 (sign-flip p 0.0078); both estimates give the same word"
    assert named in variant.notes


@pytest.mark.parametrize(("others", "word"), [(0.9, VerdictWord.BETTER), (1.1, VerdictWord.WORSE)])
def test_stalls_beside_a_change_that_both_estimates_show_take_no_verdict(others: float, word: VerdictWord) -> None:
    stalled = slowed(make_receipts(PLAN, **QUIET), lambda s: 2 * others if s.index in (7, 19) else others)
    variant = judged(stalled)
    assert (variant.verdict, variant.cause) == (word, None)
    assert any("by total and" in note and note.endswith("both estimates give the same word") for note in variant.notes)


def test_a_slower_arm_without_stalls_is_worse() -> None:
    variant = judged(slowed(make_receipts(PLAN, **QUIET), lambda _: 1.03))
    assert (variant.verdict, variant.cause) == (VerdictWord.WORSE, None)


def test_stalls_in_both_arms_are_noise() -> None:
    both = slowed(make_receipts(PLAN, **QUIET), lambda s: 3.0 if s.index == 7 else 1.0)
    assert judged(slowed(both, lambda s: 3.0 if s.index == 8 else 1.0, arm="baseline")).cause is not Cause.STALLS


def spread(arm_sd: float, speed: float) -> list[Receipt]:
    rng = np.random.default_rng(5)
    sds = {"psiv-on": arm_sd}
    return [
        make_receipt(
            PLAN,
            block,
            arm,
            tokens_per_s=float(5000 * (speed if arm == "psiv-on" else 1) * np.exp(rng.normal(0, sds.get(arm, 2e-4)))),
        )
        for block in PLAN.blocks
        for arm in block.order
    ]


def test_a_verdict_is_withheld_where_one_arm_scatters_more() -> None:
    variant = judged(spread(0.01, 1.03))
    assert (variant.verdict, variant.measured, variant.cause) == (
        VerdictWord.INCONCLUSIVE,
        VerdictWord.BETTER,
        Cause.SPREADS,
    )
    assert "trials of the variant scatter by" in variant.reason


def test_an_effect_far_beyond_the_noisier_arm_is_said_all_the_same() -> None:
    assert judged(spread(0.004, 1.2)).verdict is VerdictWord.BETTER


def admitted(aa_sd: float) -> Circumstances:
    """A device with A/A blocks of this standard deviation."""
    known = calibrate(KEY, noisy_blocks(sd=aa_sd))
    return Circumstances(admission=Admission(refused_because=None, calibrations=(known,)))


@pytest.mark.parametrize(("gain", "clear"), [(1.02, False), (1.12, True)])
def test_noise_beyond_that_of_the_aa_blocks_takes_the_verdict_unless_the_effect_is_clear(
    gain: float, clear: bool
) -> None:
    rng = np.random.default_rng(1)
    speeds = {
        (block.index, arm): float(5000 * (gain if arm == "psiv-on" else 1) * np.exp(rng.normal(0, 0.006)))
        for block in PLAN.blocks
        for arm in block.order
    }
    receipts = [make_receipt(PLAN, block, arm, tokens_per_s=speed) for (block, arm), speed in speeds.items()]
    seen = set()
    for aa_sd in (0.02, 0.01, 0.004, 0.003, 0.0028, 0.002, 0.001, 0.0001):
        variant = judged(receipts, admitted(aa_sd))
        assert variant.primary is not None
        ratio = variant.primary.sd_pct / (100 * float(np.std([b.difference for b in noisy_blocks(sd=aa_sd)], ddof=1)))
        noted = bool(stats.f.sf(ratio**2, 6, 18) <= 0.01)
        capped = noted and ratio >= 3
        assert (variant.cause is Cause.NOISE) is (capped and not clear)
        assert ("F test" in f"{variant.reason} {variant.notes}") is noted
        seen.add((noted, capped))
    assert seen == {(False, False), (True, False), (True, True)}


def attempt(failure: FailureClass, arm: str | None, block: int = 1) -> AttemptRecord:
    return AttemptRecord(block_index=block, number=1, failure_class=failure, arm=arm, message="it ended", node="node-a")


def after(*attempts: AttemptRecord) -> VariantVerdict:
    circumstances = CALIBRATED.model_copy(update={"attempts": attempts})
    return judged(make_receipts(PLAN, {"psiv-on": 1.03}, **QUIET), circumstances)


RAN = [FailureClass.NO_RECEIPT, FailureClass.TIMEOUT, FailureClass.OOM, FailureClass.INFRA_NODE]


@pytest.mark.parametrize("failure", RAN)
@pytest.mark.parametrize("arm", ["psiv-on", "baseline"])
def test_a_rerun_that_a_compared_arm_may_have_caused_takes_the_verdict(failure: FailureClass, arm: str) -> None:
    variant = after(attempt(failure, arm))
    assert (variant.verdict, variant.measured, variant.cause) == (
        VerdictWord.INCONCLUSIVE,
        VerdictWord.BETTER,
        Cause.RERUNS,
    )
    assert f"attempt 1 at block 2 ended with arm '{arm}' ({failure}: it ended)" in variant.reason
    assert variant.decision is Decision.INCONCLUSIVE


@pytest.mark.parametrize("failure", RAN)
@pytest.mark.parametrize("arm", ["chunk-32", None])
def test_a_rerun_that_no_compared_arm_caused_leaves_the_verdict(arm: str | None, failure: FailureClass) -> None:
    assert after(attempt(failure, arm)).verdict is VerdictWord.BETTER


def test_a_worker_that_vanished_between_trials_takes_the_verdicts_of_all_arms() -> None:
    gone = attempt(FailureClass.INFRA_NODE, None).model_copy(update={"vanished": True})
    variant = after(gone)
    assert (variant.verdict, variant.cause) == (VerdictWord.INCONCLUSIVE, Cause.RERUNS)
    assert "attempt 1 at block 2 ended with an unknown arm (infra_node: it ended)" in variant.reason
    other = gone.model_copy(update={"arm": "chunk-32"})
    assert after(other).verdict is VerdictWord.BETTER


@pytest.mark.parametrize(
    ("arms", "verdict"),
    [
        (["psiv-on"], VerdictWord.BETTER),
        (["psiv-on", "baseline"], VerdictWord.BETTER),
        (["psiv-on", "psiv-on"], VerdictWord.INCONCLUSIVE),
        (["baseline", "baseline", "psiv-on"], VerdictWord.BETTER),
        (["baseline"] * 3 + ["psiv-on"], VerdictWord.INCONCLUSIVE),
        ([None], VerdictWord.BETTER),
        (["psiv-on", None], VerdictWord.INCONCLUSIVE),
        (["psiv-on", "baseline", None, "chunk-32"], VerdictWord.BETTER),
    ],
)
def test_guard_hits_count_when_they_may_have_hit_one_arm_more(arms: list[str | None], verdict: VerdictWord) -> None:
    hits = [attempt(FailureClass.INVALID_MEASUREMENT, arm, block) for block, arm in enumerate(arms)]
    assert after(*hits).verdict is verdict


CUT = [FailureClass.PREEMPTED, FailureClass.INFRA_CONTROL, FailureClass.INVALID_MEASUREMENT]


def equal_after(failure: FailureClass, arm: str | None) -> VariantVerdict:
    return judged(EQUAL, CALIBRATED.model_copy(update={"attempts": (attempt(failure, arm),)}))


@pytest.mark.parametrize("failure", CUT)
@pytest.mark.parametrize("arm", ["psiv-on", "baseline", None])
def test_a_trial_that_was_cut_short_takes_the_word_same(failure: FailureClass, arm: str | None) -> None:
    variant = equal_after(failure, arm)
    assert (variant.verdict, variant.measured, variant.cause) == (
        VerdictWord.INCONCLUSIVE,
        VerdictWord.SAME,
        Cause.RERUNS,
    )
    assert f"1 attempt at its or the baseline's trials ended early (block 2, {failure}: it ended)" in variant.reason
    assert after(attempt(failure, arm)).verdict is VerdictWord.BETTER


@pytest.mark.parametrize(("failure", "arm"), [*((one, "chunk-32") for one in CUT), (FailureClass.DISTURBED, "psiv-on")])
def test_others_trials_and_others_load_leave_the_word_same(failure: FailureClass, arm: str) -> None:
    assert equal_after(failure, arm).verdict is VerdictWord.SAME


@given(st.integers(6, 30), st.integers(0, 3), st.sampled_from([0.5, 5.0, 20.0, 50.0, 80.0]))
@settings(max_examples=40)
def test_same_holds_with_the_lost_trials_twice_as_slow_as_the_slowest(blocks: int, lost: int, margin: float) -> None:
    spec = make_spec(
        design__blocks={"count": blocks}, verdict__primary={"metric": "tokens_per_s", "margin": f"{margin:g}%"}
    )
    plan = make_plan(spec)
    receipts = make_receipts(plan, sd=0.001, seed=blocks)
    cut = tuple(attempt(FailureClass.PREEMPTED, None, block) for block in range(lost))
    variant = judge(plan, spec, receipts, CALIBRATED.model_copy(update={"attempts": cut})).variants[0]
    trials = {(one.ids.block_index, one.arm): one for one in receipts}
    pairs = [(trials[block, "psiv-on"], trials[block, "baseline"]) for block in range(blocks)]
    d = [math.log(own.summary.tokens_per_s / base.summary.tokens_per_s) for own, base in pairs]  # type: ignore[union-attr]
    x = [own.ids.position - base.ids.position for own, base in pairs]
    assert variant.primary is not None
    proved = []
    for worst in (min(d) - math.log(2), max(d) + math.log(2)):
        line = stats.linregress([*x, *[0] * lost], [*d, *[worst] * lost])
        reach = stats.t.ppf(1 - alpha_of(1) / 2, blocks + lost - 2) * line.intercept_stderr * variant.primary.widened
        ends = line.intercept - reach, line.intercept + reach
        proved.append(math.log1p(-margin / 100) <= ends[0] and ends[1] <= math.log1p(margin / 100))
    assert variant.measured is VerdictWord.SAME
    assert (variant.verdict is VerdictWord.SAME) is all(proved)


@pytest.mark.parametrize("metric", ["tokens_per_s", "loss_val"])
@pytest.mark.parametrize("failure", [FailureClass.PREEMPTED, FailureClass.DISTURBED])
def test_a_requirement_of_a_speed_is_not_proved_beside_a_trial_that_was_cut_short(
    metric: str, failure: FailureClass
) -> None:
    spec = make_spec(
        design__blocks={"count": 8},
        design__seeds=8,
        workload__steps={"warmup": 1, "timed": 25, "val_rows": 2},
        verdict__primary={"metric": "loss_val" if metric == "tokens_per_s" else "tokens_per_s", "margin": "1%"},
        verdict__require=[{"metric": metric, "not_worse_by": "1%"}],
    )
    plan = make_plan(spec)
    cut = CALIBRATED.model_copy(update={"attempts": (attempt(failure, "psiv-on"),)})
    losses = np.random.default_rng(1).normal(7.5, 0.001, (8, 3))
    receipts = [
        make_receipt(plan, block, arm, loss_val=float(losses[block, place]), tokens_per_s=5000.0 + place + block % 3)
        for block in range(8)
        for place, arm in enumerate(("baseline", "psiv-on", "chunk-32"))
    ]
    (result,) = judge(plan, spec, receipts, cut).variants[0].requirements
    lost = metric == "tokens_per_s" and failure is FailureClass.PREEMPTED
    assert (result.passed, result.undecided) == (not lost, lost), result.detail
    assert ("if a trial that ended early took twice" in result.detail) is lost


@given(st.lists(st.sampled_from(["psiv-on", "baseline", "chunk-32", None]), max_size=40))
def test_others_load_counts_once_chance_does_not_explain_its_arms(arms: list[str | None]) -> None:
    hits = [attempt(FailureClass.DISTURBED, arm, block) for block, arm in enumerate(arms)]
    own, base = arms.count("psiv-on"), arms.count("baseline")
    p = stats.binomtest(own, own + base).pvalue if own + base else 1.0
    why = _reruns_by(hits, "psiv-on", "baseline")
    assert (why is not None) is bool(p <= 0.05)
    assert why is None or f"{own} attempts in its trials and {base} in the baseline's" in why


@given(
    st.sets(st.integers(0, 7)),
    st.lists(st.sampled_from([FailureClass.DISTURBED, FailureClass.PREEMPTED, FailureClass.USER_ERROR]), max_size=3),
)
def test_an_ablation_is_spoiled_by_load_if_nothing_else_kept_blocks_away(
    done: set[int], ends: list[FailureClass]
) -> None:
    hits = tuple(attempt(failure, "psiv-on") for failure in ends)
    receipts = [one for one in EQUAL if one.ids.block_index in done]
    outside = FailureClass.DISTURBED in ends and FailureClass.USER_ERROR not in ends
    for looks, spoiled in (({"8": 1.0}, len(done) < 8), ({"6": 0.5, "8": 0.5}, len(done) < 6)):
        verdict = judge(PLAN, SPEC, receipts, CALIBRATED.model_copy(update={"attempts": hits}))
        verdict = verdict.model_copy(update={"rule": {**verdict.rule, "looks": looks}})
        assert was_spoiled(verdict) is (outside and spoiled)


def asked(number: int) -> Circumstances:
    earlier = [
        EarlierAblation(
            ablation=f"abl_{index}",
            name="again",
            state=AblationState.CANCELLED,
            created_at="2026-11-20T12:00:00Z",
            words={},
            **ASKED,
        )
        for index in range(1, number)
    ]
    return CALIBRATED.model_copy(update={"family": Family(question_digest="sha256:q", earlier=tuple(earlier))})


ASKED: dict[str, Any] = {"asked": ("psiv-on",)} if "asked" in EarlierAblation.model_fields else {}


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_question_asked_again_is_tested_at_its_level(number: int) -> None:
    variant = judged(make_receipts(PLAN, {"psiv-on": 1.03}, **QUIET), asked(number))
    assert variant.primary is not None
    assert variant.primary.alpha == alpha_of(number)
    notes = [note for note in variant.notes if note.startswith(f"asking {number} of this question, tested at ")]
    assert len(notes) == (number > 1)
    assert all("'again' (cancelled)" in note for note in notes)


@pytest.mark.parametrize("measured", [True, False])
def test_an_exact_metric_says_which_asking_it_is_and_no_level(*, measured: bool) -> None:
    spec = make_spec(verdict__primary={"metric": "peak_allocated_gib", "margin": "0%", "adopt_if": None})
    plan = make_plan(spec)
    receipts = make_receipts(plan) if measured else []
    variant = judge(plan, spec, receipts, asked(3)).variants[0]
    assert (variant.exact is not None) == measured
    assert [note for note in variant.notes if "asking" in note] == [
        "asking 3 of this question; before it: 'again' (cancelled), 'again' (cancelled)"
    ]


def test_a_late_asking_needs_more_than_a_first() -> None:
    receipts = make_receipts(PLAN, {"psiv-on": 1.018}, sd=0.003, seed=3)
    verdicts = [judged(receipts, asked(number)).verdict for number in (1, 20)]
    assert verdicts == [VerdictWord.BETTER, VerdictWord.INCONCLUSIVE]


def test_a_failed_exact_requirement_is_said_first_and_rejects_whatever_the_speed_does() -> None:
    spec = make_spec(verdict__require=[{"metric": "peak_allocated_gib", "max_delta": 0.25}])
    plan = make_plan(spec)
    receipts = make_receipts(plan, sd=0.05)
    fat = [make_receipt(plan, r.ids.block_index, r.arm, peak_bytes=2 * GIB) if r.arm == "psiv-on" else r
           for r in receipts]  # fmt: skip
    variant = judge(plan, spec, fat, Circumstances()).variants[0]
    assert (variant.verdict, variant.decision) == (VerdictWord.INCONCLUSIVE, Decision.REJECT)
    assert variant.reason.startswith("peak_allocated_gib max_delta 0.25 GiB is not met: largest change +0.5 GiB; ")
    lost = [make_receipt(plan, r.ids.block_index, r.arm, memory=None) if r.arm == "psiv-on" else r for r in receipts]
    assert judge(plan, spec, lost, Circumstances()).variants[0].decision is Decision.INCONCLUSIVE


def test_better_is_said_only_when_the_interval_clears_the_margin() -> None:
    near = judged(make_receipts(PLAN, {"psiv-on": 1.006}, sd=0.003))
    slow = judged(make_receipts(PLAN, {"psiv-on": 0.994}, sd=0.003))
    far = judged(make_receipts(PLAN, {"psiv-on": 1.03}, sd=0.003))
    assert (near.verdict, near.cause) == (VerdictWord.INCONCLUSIVE, Cause.ABOVE_ZERO)
    assert "above zero, maybe below the margin of 0.5 % (p" in near.reason
    assert near.meets(Required.NOT_WORSE)
    assert (slow.verdict, slow.cause) == (VerdictWord.INCONCLUSIVE, Cause.BELOW_ZERO)
    assert not slow.meets(Required.NOT_WORSE)
    assert far.verdict is VerdictWord.BETTER
    assert "better by more than the margin of 0.5 %" in far.reason
