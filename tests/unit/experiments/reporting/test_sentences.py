"""Sentences of a verdict: what a colleague would say, for every word and every cause of an open one."""

from typing import Any

import pytest

from ablate.experiments.analysis.verdicts import Cause, Comparison, RequirementResult, VariantVerdict, Verdict
from ablate.experiments.outcomes import Decision, FailureClass, VerdictWord
from ablate.experiments.records.circumstances import Admission, AttemptRecord, Circumstances
from ablate.experiments.reporting import sentences
from ablate.experiments.reporting.terminal.markdown import verdict_markdown
from ablate.experiments.reporting.verdict_layout import interval_heading, lay_out
from tests import views

FOUND = Comparison(
    metric="tokens_per_s",
    blocks=6,
    alpha=0.04,
    delta_pct=2.4,
    median_pct=2.3,
    by_median_pct=0.1,
    outlier_steps=(1, 9),
    ci_low_pct=0.2,
    ci_high_pct=4.6,
    tost_low_pct=0.3,
    tost_high_pct=4.5,
    p_sign_flip=0.03,
    p_holm=0.01,
    p_same=0.9,
    sd_pct=1.0,
    place_pct=0.1,
    mde_pct=1.5,
    differences_pct=(2.4,) * 6,
)
OPEN: dict[str, Any] = {
    "verdict": VerdictWord.INCONCLUSIVE,
    "measured": VerdictWord.BETTER,
    "decision": Decision.INCONCLUSIVE,
}


def verdict(known: Circumstances | None = None, **changes: Any) -> Verdict:
    """Return a verdict on one variant whose comparison is FOUND."""
    made = views.cpu_view(calibrated=True).verdict
    assert made is not None
    fields = {"primary": FOUND, "verdict": VerdictWord.BETTER, "measured": VerdictWord.BETTER, "cause": None,
              "secondary": (), "requirements": (), "notes": (),
              "blocks_needed": None}  # fmt: skip
    variant = made.variants[0].model_copy(update={**fields, **changes})
    return made.model_copy(
        update={"variants": (variant,), "circumstances": made.circumstances if known is None else known}
    )


def sentence(judged: Verdict) -> str:
    (variant,) = judged.variants
    return sentences.sentence(judged, variant).replace("\N{NO-BREAK SPACE}", " ")


def remarks(judged: Verdict) -> str:
    (variant,) = judged.variants
    return " ".join(sentences.remarks(judged, variant)).replace("\N{NO-BREAK SPACE}", " ")


def test_better_is_said_beyond_the_margin_and_a_proved_gain_that_may_be_smaller_is_undecided() -> None:
    start = "hroughput is 2.40 % higher (+0.20 to +4.60 % with 96 % confidence, 6 blocks); "
    unseen = "6 blocks do not exclude that up to 39 % of this arm's runs are far worse than these"
    assert sentence(verdict()) == f"T{start}that is more than the margin of 0.5 %; {unseen}."
    below = sentence(verdict(**OPEN | {"measured": VerdictWord.INCONCLUSIVE}, cause=Cause.ABOVE_ZERO))
    assert below == f"Not decided: t{start}the difference is proved, but not that it exceeds the margin of 0.5 %."


def test_worse_and_same_name_the_direction_and_the_margin() -> None:
    slower = FOUND.model_copy(update={"delta_pct": -2.4, "ci_low_pct": -4.6, "ci_high_pct": -0.2})
    worse = {"verdict": VerdictWord.WORSE, "measured": VerdictWord.WORSE, "primary": slower}
    assert sentence(verdict(**worse)).startswith(
        "Throughput is 2.40 % lower (\N{MINUS SIGN}4.60 to \N{MINUS SIGN}0.20 %"
    )
    same = {"verdict": VerdictWord.SAME, "measured": VerdictWord.SAME}
    assert sentence(verdict(**same)).startswith(
        "Throughput is the same within the margin of 0.5 %: the change is +2.40 %"
    )


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (Cause.MISSING, "blocks are missing"),
        (Cause.NOT_PROVED, "proves neither a difference nor sameness within the margin of 0.5 %"),
        (Cause.STALLS, "+2.40 % in total, +0.10 % by median step, 9 slow steps against 1"),
        (Cause.SPREADS, "scatter far more than the other's"),
        (Cause.NOISE, "scatter far more than the A/A blocks"),
        (Cause.RERUNS, "one of the arms may be the cause. The samples say 'better': throughput is"),
        (Cause.UNCALIBRATED, "no A/A blocks are known for this device. The samples say 'better': throughput is"),
    ],
)  # fmt: skip
def test_every_cause_is_said(cause: Cause, words: str) -> None:
    text = sentence(verdict(Circumstances(), **OPEN, cause=cause))
    assert text.startswith("Not decided: ")
    assert words in text


def test_steps_that_are_spread_unlike_are_not_called_slow() -> None:
    even = FOUND.model_copy(update={"outlier_steps": (0, 0)})
    text = sentence(verdict(**OPEN, cause=Cause.STALLS, primary=even))
    assert "without outliers: +2.40 % in total, +0.10 % by median step." in text
    assert "slow" not in text


def test_other_work_is_said_before_what_the_samples_say() -> None:
    other = "a step has 256 tokens, the baseline's 512"
    text = sentence(verdict(Circumstances(), **OPEN, cause=Cause.OTHER_WORK, other_work=other))
    assert text.startswith(f"Not decided: {other}, so the two are not comparable. The samples say 'better': ")


def test_every_cause_has_its_sentence() -> None:
    assert all(sentence(verdict(**OPEN, cause=cause)).startswith("Not decided: ") for cause in Cause)


def test_a_broken_exact_requirement_comes_first() -> None:
    broken = RequirementResult(
        metric="peak_reserved_gib",
        rule="max_delta 0.5 GiB",
        passed=False,
        detail="largest change +0.76 GiB",
        exact=True,
    )
    soft = broken.model_copy(update={"exact": False, "metric": "loss_final"})
    text = sentence(verdict(requirements=(soft, broken)))
    assert text.startswith(
        "It breaks a requirement: peak reserved memory, max_delta 0.5 GiB: largest change +0.76 GiB. Throughput is"
    )
    assert "loss" not in text


def test_help_names_the_command_and_what_another_ablation_would_give() -> None:
    known = Circumstances(admission=Admission(mended_by="ablate aa cpu"))
    assert "To calibrate: ablate aa cpu." in remarks(verdict(known, **OPEN, cause=Cause.UNCALIBRATED))
    assert "ablate aa" not in remarks(verdict(known, **OPEN, cause=Cause.STALLS))
    more = {"blocks_needed": 20, "chances": {12: 0.6, 20: 0.83}, "device_minutes_needed": 12.4}
    expected = "Another ablation of 20 blocks would answer with a chance of 83 % and take about 12 device minutes."
    why = (
        " The standard deviation between blocks is 1.00 %; a quieter machine or a longer window (workload.steps.timed)"
    )
    assert remarks(verdict(**OPEN, cause=Cause.NOT_PROVED, **more)) == f"{expected}{why} needs fewer blocks."


def test_where_admission_is_lacking_the_command_comes_before_a_number_of_blocks_and_is_in_every_header() -> None:
    few, command = "5 A/A blocks are known for this device; 20 admit it", "ablate aa cpu --like abl_1"
    known = Circumstances(admission=Admission(refused_because=few, mended_by=command))
    more = {"blocks_needed": 40, "chances": {40: 0.815}, "device_minutes_needed": 43.0}
    judged = verdict(known, **OPEN | {"measured": VerdictWord.INCONCLUSIVE}, cause=Cause.NOT_PROVED, **more)
    first, second, *_ = sentences.remarks(judged, judged.variants[0])
    assert first == f"To calibrate: {command}."
    assert second.startswith("Once the device is calibrated, another ablation of 40 blocks would answer with a chance")
    far = judged.variants[0].model_copy(update={"blocks_needed": 812})
    assert "812" not in "".join(sentences.remarks(judged, far)), "the first lines say what to do instead"
    header = f"uncalibrated: {few}; to calibrate: {command}"
    assert lay_out(judged).caveat == header
    assert header in verdict_markdown(judged)


def test_the_verdict_names_its_cause_beside_what_the_samples_say() -> None:
    def text(**changes: Any) -> str:
        return str(lay_out(verdict(**changes)).variants[0].word)

    assert text(**OPEN, cause=Cause.UNCALIBRATED) == "? inconclusive (uncalibrated; samples say better)"
    assert text(**OPEN | {"measured": VerdictWord.INCONCLUSIVE}, cause=Cause.STALLS) == "? inconclusive (stalls differ)"
    assert text() == "\N{BLACK UP-POINTING TRIANGLE} better"


def test_intervals_are_named_by_their_own_confidence() -> None:
    assert interval_heading(verdict()) == "96\N{NO-BREAK SPACE}% interval"
    second = FOUND.model_copy(update={"alpha": 0.005})
    assert interval_heading(verdict(primary=second)) == "99.5\N{NO-BREAK SPACE}% interval"
    both = verdict()
    (one,) = both.variants
    other: VariantVerdict = one.model_copy(update={"arm": "other", "primary": second})
    assert interval_heading(both.model_copy(update={"variants": (one, other)})) == "interval"


def test_of_several_that_may_be_adopted_one_is() -> None:
    (first,) = verdict(decision=Decision.ADOPT).variants
    second = first.model_copy(update={"arm": "other"})
    third = first.model_copy(update={"arm": "third", "decision": Decision.REJECT})
    little = "third (better by 2.40\N{NO-BREAK SPACE}%, below the 3\N{NO-BREAK SPACE}% from which the rule adopts)"
    assert sentences.lead((first, second, third), 3) == f"Adopt one of psiv-on and other; do not adopt {little}."
    worse = third.model_copy(update={"verdict": VerdictWord.WORSE, "measured": VerdictWord.WORSE})
    assert sentences.lead((first, worse), 3) == "Adopt psiv-on; do not adopt third."


def test_the_lead_says_which_requirement_rejects_a_better_or_equal_variant() -> None:
    broken = RequirementResult(metric="loss_val", rule="not_worse_by 1 %", passed=False, detail="no", exact=False)
    open_one = broken.model_copy(update={"metric": "peak_allocated_gib", "undecided": True})
    for word in (VerdictWord.BETTER, VerdictWord.SAME):
        (variant,) = verdict(
            verdict=word, measured=word, decision=Decision.REJECT, requirements=(open_one, broken)
        ).variants
        lead = sentences.lead((variant,), 3)
        assert lead == "Do not adopt psiv-on (validation loss not_worse_by 1 % is not met)."


def test_attempts_that_broke_are_said_by_arm_and_reason() -> None:
    def broke(index: int, arm: str | None, message: str) -> AttemptRecord:
        failure = FailureClass.TIMEOUT if arm else FailureClass.INFRA_NODE
        return AttemptRecord(block_index=index, number=1, failure_class=failure, arm=arm, message=message, node="a")

    first = broke(0, "psiv-on", "arm 'psiv-on': 90 s are over")  # its name stands before the message as well
    attempts = (first, broke(2, "psiv-on", "91 s"), broke(1, None, "the node is gone"))
    assert list(sentences.broken_attempts(verdict(Circumstances(attempts=attempts)))) == [
        "2 broken attempts in blocks 1, 3: arm psiv-on, timeout: 90 s are over",
        "1 broken attempt in block 2: no arm in particular, infra_node: the node is gone",
    ]
