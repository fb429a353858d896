import random

import pytest

from experiments.outcomes import AblationState, Decision
from experiments.records.bundle_reader import open_bundle
from experiments.records.circumstances import EarlierAblation, Family
from experiments.records.signing import Signer
from experiments.reporting.terminal.markdown import MAX_CHARS, pull_request_markdown
from experiments.reporting.view import judge_bundle
from tests.bundles import make_bundle, make_file

SIGNER = Signer(b"p" * 32)
VERDICT = judge_bundle(open_bundle(make_bundle(make_file(), signer=SIGNER)))


def test_requirement_stands_first() -> None:
    text = pull_request_markdown(VERDICT, Decision.ADOPT)
    assert text.startswith("**Required of every variant: adopt. Not met: `psiv-on` is ")
    decision = VERDICT.variants[0].decision
    met = pull_request_markdown(VERDICT.model_copy(update={"variants": VERDICT.variants[:1]}), decision)
    assert met.startswith(f"**Required of every variant: {decision}. Met.**")
    assert "Required" not in pull_request_markdown(VERDICT)


def test_evidence_names_blocks_and_keys() -> None:
    text = pull_request_markdown(VERDICT)
    assert f"- blocks 1-6 ran on `far-node`; signed by `{SIGNER.key}`" in text
    assert "- 6 of 6 blocks on cpu counted; no attempt broke" in text
    assert "- verdicts are capped: " in text
    unsigned = judge_bundle(open_bundle(make_bundle(make_file(), [0])))
    assert "unsigned" in pull_request_markdown(unsigned)


def test_earlier_askings_of_the_question_are_named() -> None:
    earlier = EarlierAblation.model_construct(ablation="abl_1", name="cache", state=AblationState.CANCELLED)
    known = VERDICT.circumstances.model_copy(update={"family": Family.model_construct(earlier=(earlier,))})
    text = pull_request_markdown(VERDICT.model_copy(update={"circumstances": known}))
    assert "asking 2 of this question; earlier: `cache` (cancelled)" in text


@pytest.mark.parametrize("require", list(Decision))
def test_every_decision_can_be_required(require: Decision) -> None:
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
    text = pull_request_markdown(verdict, Decision.ADOPT)
    assert len(text) <= MAX_CHARS
    lines = text.split("\n")
    assert [one.arm for one in many if not any(line.startswith(f"| `{one.arm}` |") for line in lines)] == []
    others = [one.arm for one in many if one.decision is not Decision.ADOPT]
    assert [arm for arm in others if f"`{arm}` is " not in lines[0]] == []
    assert len(text) > MAX_CHARS - 1100 or (count, longest) != (64, 2000), "no more is left out than has to be"
    whole = all(any(line.startswith(f"- `{one.arm}`: ") for line in lines) for one in many)
    assert whole or lines[-1] == f"- the rest does not fit here: `ablate verdict {verdict.ablation} --explain`"
