"""What is said of undecided samples: drawn effects and noise, against the numbers of the comparison."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.verdicts import OPEN, Cause, Verdict
from ablate.experiments.design.metrics import OTHER_PROGRAM
from ablate.experiments.design.rule import COMPARISON
from ablate.experiments.outcomes import FailureClass, VerdictWord
from ablate.experiments.records.circumstances import CALIBRATED, Admission, AttemptRecord, Family
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.outlook import outlook, to_continue
from ablate.experiments.reporting.sentences import remarks
from tests.factories import make_plan, make_receipts, make_spec

SPEC = make_spec(design__blocks={"count": 8})
PLAN = make_plan(SPEC)
ASKED = Family(question_digest="sha256:q")
UNKNOWN = Admission(refused_because="there are no A/A blocks for cpu x")


def judged(effect: float, sd: float, *, blocks: int = 8, admission: Admission = CALIBRATED.admission) -> Verdict:
    receipts = [one for one in make_receipts(PLAN, {"psiv-on": effect}, sd=sd) if one.ids.block_index < blocks]
    circumstances = CALIBRATED.model_copy(update={"family": ASKED, "admission": admission})
    return judge(PLAN, SPEC, receipts, circumstances)


@settings(max_examples=40, deadline=None)
@given(effect=st.floats(0.5, 2.0), sd=st.floats(0.0005, 0.2), blocks=st.integers(4, 8), known=st.booleans())
def test_a_line_has_the_numbers_of_the_samples_and_says_probably_only_if_zero_is_outside(
    *, effect: float, sd: float, blocks: int, known: bool
) -> None:
    verdict = judged(effect, sd, blocks=blocks, admission=CALIBRATED.admission if known else UNKNOWN)
    lines = outlook(verdict, verdict.variants)
    undecided = [one for one in verdict.variants if one.verdict is VerdictWord.INCONCLUSIVE]
    for variant, line in zip(undecided, lines, strict=False):
        primary = variant.primary
        assert primary is not None
        outside = primary.ci_low_pct > 0 or primary.ci_high_pct < 0
        assert line.startswith(f"{variant.arm}: throughput {'is probably' if outside else 'may be higher or lower'}")
        if outside:
            match = re.search(r"probably ([\d.,]+)\W%\s(higher|lower)", line)
            assert match is not None, line
            assert float(match[1].replace(",", "")) == round(abs(primary.delta_pct), 2)
            assert match[2] == ("higher" if primary.delta_pct > 0 else "lower")
        low, high = (wording.percent(end) for end in (primary.ci_low_pct, primary.ci_high_pct))
        excluded = f"Differences below {low} and above {high} are excluded with {wording.confidence(0.04)} confidence"
        assert (excluded in line) == (variant.cause in OPEN), "only where the tests hold"
        assert (wording.interval(primary.ci_low_pct, primary.ci_high_pct) in line) == (variant.cause not in OPEN)
        if blocks < 8:
            assert f"not publishable: {blocks} of 8 planned blocks counted" in line
    last = [line for line in lines if line.startswith("Continue")]
    many = [line for line in lines if "the noise here is larger than such an effect" in line]
    near = [line for line in lines if "a difference is proved, but it is too near to the margin of 1 %" in line]
    open_ = [one for one in to_continue(verdict.variants) if one.cause in OPEN and (one.blocks_needed or 0) > 80]
    assert len(near) == sum(one.cause is not Cause.NOT_PROVED for one in open_)
    many += near
    needed = [one.blocks_needed or 0 for one in to_continue(verdict.variants) if one.cause in OPEN]
    assert len(many) == sum(blocks > 80 for blocks in needed)
    assert len(last) == (len(to_continue(verdict.variants)) > len(many))
    price = "(a repeated question is tested more strictly, at 0.5 % instead of 4 %)".replace(" %", f"{wording.SPACE}%")
    for line in last:
        assert line.endswith(": ablate run --continue factory")
        assert (price in line) == any(one.cause is not Cause.MISSING for one in to_continue(verdict.variants))
    assert len(lines) == len(undecided) + len(last)


@pytest.mark.parametrize(
    ("node_class", "metric", "program", "words", "by_work"),
    [
        ("cpu", "process_s", True, "Only fewer other programs or longer trials show more.", True),
        ("cpu", "step_s", True, "Only fewer other programs or longer trials show more.", True),
        ("cpu", "cpu_s", True, "Only fewer other programs or longer trials show more.", False),
        ("cpu", "cpu_step_s", True, "Only fewer other programs or longer trials show more.", False),
        ("cpu", "tokens_per_s", False, "Only fewer other programs or longer trials show more.", False),
        ("h200", "tokens_per_s", True, "a node that nothing else uses", False),
    ],
)
def test_noise_that_takes_many_blocks_gets_the_command_that_asks_by_processor_time(
    node_class: str, metric: str, program: bool, words: str, by_work: bool
) -> None:
    verdict = judged(1.0, 0.05)
    comparison = {**COMPARISON, **(OTHER_PROGRAM if program else {})}
    rule = {**verdict.rule, "comparison": comparison, "primary": {**verdict.rule["primary"], "metric": metric}}
    verdict = verdict.model_copy(update={"rule": rule, "node_class": node_class})
    variant = next(one for one in verdict.variants if one.arm == "psiv-on")
    assert variant.primary is not None
    primary = variant.primary.model_copy(update={"metric": metric})
    for needed in (812, None):
        changes = {"blocks_needed": needed, "cause": Cause.NOT_PROVED, "primary": primary}
        line, *more = outlook(verdict, [variant.model_copy(update=changes)])
        assert "812" not in line
        assert words in line
        assert ("more blocks would hardly prove it" in line) == (needed is None)
        commands = [one.rpartition(": ")[2] for one in more]
        assert commands == ["ablate run --continue factory --processor-time"] * by_work


def test_a_proposal_that_needs_more_blocks_is_to_be_proposed_again() -> None:
    verdict = judged(1.0, 0.05).model_copy(update={"blocks_planned": 20})
    variant = next(one for one in verdict.variants if one.arm == "psiv-on")
    noisy = variant.model_copy(update={"blocks_needed": 28, "cause": Cause.NOT_PROVED})
    line, *more = outlook(verdict, [noisy])
    assert line.endswith("would probably do."), line
    assert more
    comparison = {**verdict.rule["comparison"], "session": {"name": "night"}}
    own = verdict.model_copy(update={"rule": {**verdict.rule, "comparison": comparison}})
    (line,) = outlook(own, [noisy])
    assert "another 28 blocks" in line
    again = "a proposal is not extended: propose the change again with design: {blocks: {count: 48}} or more"
    assert again in line


@settings(max_examples=300, deadline=None)
@given(
    load=st.none() | st.floats(0.0, 1.0),
    planned=st.integers(6, 300),
    needed=st.integers(6, 1000),
    node_class=st.sampled_from(["cpu", "h200"]),
)
def test_more_blocks_are_advised_only_where_load_is_not_the_reason_and_never_hundreds_beyond_the_plan(
    load: float | None, planned: int, needed: int, node_class: str
) -> None:
    verdict = judged(1.0, 0.05)
    arms = {name: arm.model_copy(update={"foreign_load": load}) for name, arm in verdict.arms.items()}
    verdict = verdict.model_copy(update={"arms": arms, "blocks_planned": planned, "node_class": node_class})
    variant = next(one for one in verdict.variants if one.arm == "psiv-on")
    noisy = variant.model_copy(update={"blocks_needed": needed, "cause": Cause.NOT_PROVED})
    line, *more = outlook(verdict, [noisy])
    busy = node_class == "cpu" and (load or 0.0) > 0.1
    advised = needed <= planned if busy else needed <= 10 * planned and (needed <= 100 or needed <= 2 * planned)
    assert (f"another {needed} blocks" in line) == advised == bool(more)
    assert ("others took" in line) == (busy and not advised)
    if not advised:
        assert f"{needed} block" not in line
        assert line.count("other programs") == (node_class == "cpu")
    assert any(f"ablation of {needed} blocks would answer" in one for one in remarks(verdict, noisy)) == advised


def test_a_verdict_without_a_service_or_without_doubt_names_no_command() -> None:
    sure = judged(1.2, 0.001)
    assert [one for one in outlook(sure, sure.variants[:1]) if "psiv-on" in one or "Continue" in one] == []
    open_one = judged(1.2, 0.01, admission=UNKNOWN)
    (line, *_rest, last) = outlook(open_one, open_one.variants[:1])
    assert "not publishable: there are no A/A blocks for cpu x." in line
    assert last.startswith("Continue with new blocks (a repeated question is tested more strictly")
    assert last.endswith(": ablate run --continue factory")
    offline = open_one.model_copy(update={"circumstances": CALIBRATED})
    assert not any("Continue" in one for one in outlook(offline, offline.variants[:1]))


def test_an_ablation_that_load_spoiled_whole_says_how_to_continue() -> None:
    hit = AttemptRecord(
        block_index=0, number=1, failure_class=FailureClass.DISTURBED, arm="psiv-on", message="x", node="n"
    )
    circumstances = CALIBRATED.model_copy(update={"family": ASKED, "attempts": (hit,)})
    verdict = judge(PLAN, SPEC, [], circumstances)
    assert {one.cause for one in verdict.variants} == {Cause.MISSING}
    assert outlook(verdict, verdict.variants) == ("Continue: ablate run --continue factory",)
