import random

import pytest

from ablate.experiments.analysis.verdicts import RequirementResult
from ablate.experiments.outcomes import AblationState, Decision, Required, VerdictWord
from ablate.experiments.records.bundle_reader import open_bundle
from ablate.experiments.records.circumstances import EarlierAblation, Family
from ablate.experiments.records.signing import Signer
from ablate.experiments.reporting.terminal.markdown import MAX_CHARS, Asked, pull_request_markdown
from ablate.experiments.reporting.view import judge_bundle
from tests.bundles import make_bundle, make_file

SIGNER = Signer(b"p" * 32)
VERDICT = judge_bundle(open_bundle(make_bundle(make_file(), signer=SIGNER)))


def test_requirement_stands_first() -> None:
    text = pull_request_markdown(VERDICT, Required.ADOPT)
    assert text.startswith("**Required of every variant: adopt. Not met: `psiv-on` is ")
    decision = Required(VERDICT.variants[0].decision)
    met = pull_request_markdown(VERDICT.model_copy(update={"variants": VERDICT.variants[:1]}), decision)
    assert met.startswith(f"**Required of every variant: {decision}. Met.**")
    assert "Required" not in pull_request_markdown(VERDICT)


def test_every_decision_is_also_a_requirement() -> None:
    assert {*Decision} == {*Required} - {Required.NOT_WORSE}


@pytest.mark.parametrize("word", list(VerdictWord))
@pytest.mark.parametrize(("passed", "undecided"), [(True, False), (False, False), (False, True), (None, None)])
def test_not_worse_needs_a_proof_of_the_metric_and_of_every_requirement(
    word: VerdictWord, passed: bool | None, undecided: bool | None
) -> None:
    bound = {"metric": "loss_val", "rule": "identical", "detail": "", "exact": True}
    results = () if passed is None else (RequirementResult(**bound, passed=passed, undecided=undecided),)
    one = VERDICT.variants[0].model_copy(update={"verdict": word, "requirements": results})
    text = pull_request_markdown(VERDICT.model_copy(update={"variants": (one,)}), Required.NOT_WORSE)
    is_met = word in ("better", "same") and passed is not False
    assert one.meets(Required.NOT_WORSE) is is_met
    assert ("not-worse. Met." in text) == is_met
    unmet = ", without proof of loss_val identical" * (word in ("better", "same"))
    assert is_met or f"Not met: `{one.arm}` is {word}{unmet}.**" in text


def test_the_question_names_commits_metric_and_links() -> None:
    links = {"page": "https://a.example/a/abl_1", "MLflow": "https://m.example/#/x"}
    asked = Asked(question="Is it | slower?", commits={"baseline": "a" * 40, "psiv-on": "b" * 40}, links=links)
    text = pull_request_markdown(VERDICT, Required.NOT_WORSE, asked)
    lines = text.split("\n")
    assert lines[2] == "Is it \\| slower?"
    commits = f"`baseline` is commit {'a' * 12}, `psiv-on` is commit {'b' * 12}"
    assert lines[4] == f"Measured: {commits}; by throughput."
    assert lines[6] == "[page](https://a.example/a/abl_1), [MLflow](https://m.example/#/x)"
    plain = pull_request_markdown(VERDICT, None, Asked(question="Q?", commits={}, links={}))
    assert plain.startswith("Q?\n\n**")


def test_evidence_names_blocks_and_keys() -> None:
    text = pull_request_markdown(VERDICT)
    assert f"- blocks 1-6 ran on `far-node`; signed by `{SIGNER.key}`" in text
    assert "- 6 of 6 blocks on cpu counted; no broken attempt" in text
    assert "- uncalibrated: " in text
    unsigned = judge_bundle(open_bundle(make_bundle(make_file(), [0])))
    assert "unsigned" in pull_request_markdown(unsigned)


def test_earlier_askings_of_the_question_are_named() -> None:
    earlier = EarlierAblation.model_construct(ablation="abl_1", name="cache", state=AblationState.CANCELLED)
    known = VERDICT.circumstances.model_copy(update={"family": Family.model_construct(earlier=(earlier,))})
    text = pull_request_markdown(VERDICT.model_copy(update={"circumstances": known}))
    assert "asking 2 of this question; earlier: `cache` (cancelled)" in text


@pytest.mark.parametrize("require", list(Required))
def test_every_decision_can_be_required(require: Required) -> None:
    assert f"Required of every variant: {require}." in pull_request_markdown(VERDICT, require)


@pytest.mark.parametrize("count", [1, 12, 64])
@pytest.mark.parametrize("longest", [3, 30, 2000])
def test_a_comment_fits_however_much_there_is_to_say(count: int, longest: int) -> None:
    draw, first = random.Random(longest + count), VERDICT.variants[0]  # noqa: S311 - draws that repeat
    many = tuple(
        first.model_copy(
            update={
                "arm": f"{'v' * draw.randint(1, 55)}-{number:02}",
                "decision": draw.choice(list(Decision)),
                "primary": None,
                "reason": "word " * draw.randint(longest // 2, longest),
            }
        )
        for number in range(count)
    )
    arms = VERDICT.arms | {one.arm: VERDICT.arms[first.arm] for one in many}
    verdict = VERDICT.model_copy(update={"variants": many, "arms": arms})
    text = pull_request_markdown(verdict, Required.ADOPT)
    assert len(text) <= MAX_CHARS
    lines = text.split("\n")
    assert [one.arm for one in many if not any(line.startswith(f"| `{one.arm}` |") for line in lines)] == []
    others = [one.arm for one in many if one.decision is not Decision.ADOPT]
    assert [arm for arm in others if f"`{arm}` is " not in lines[0]] == []
    assert len(text) > MAX_CHARS - 1100 or (count, longest) != (64, 2000), "no more is left out than has to be"
    whole = all(any(line.startswith(f"- `{one.arm}`: ") for line in lines) for one in many)
    assert whole or lines[-1] == f"- the rest does not fit here: `ablate verdict {verdict.ablation} --explain`"
