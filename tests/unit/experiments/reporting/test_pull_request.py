import pytest

from experiments.outcomes import AblationState, Decision
from experiments.records.bundle_reader import open_bundle
from experiments.records.circumstances import EarlierAblation, Family
from experiments.records.signing import Signer
from experiments.reporting.pull_request import pull_request_markdown
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
    assert "- words are capped: " in text
    unsigned = judge_bundle(open_bundle(make_bundle(make_file(), [0])))
    assert "nobody signed them" in pull_request_markdown(unsigned)


def test_earlier_attempts_at_the_question_are_named() -> None:
    earlier = EarlierAblation.model_construct(ablation="abl_1", name="x", state=AblationState.CANCELLED)
    known = VERDICT.circumstances.model_copy(update={"family": Family.model_construct(earlier=(earlier,))})
    text = pull_request_markdown(VERDICT.model_copy(update={"circumstances": known}))
    assert "attempt 2 of this question; before: `abl_1` (cancelled)" in text


@pytest.mark.parametrize("require", list(Decision))
def test_every_decision_can_be_required(require: Decision) -> None:
    assert f"Required of every variant: {require}." in pull_request_markdown(VERDICT, require)
