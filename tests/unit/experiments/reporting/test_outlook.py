"""What is said of undecided samples: drawn effects and noise, against the numbers of the comparison."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.verdicts import OPEN, Cause, Verdict
from ablate.experiments.outcomes import FailureClass, VerdictWord
from ablate.experiments.records.circumstances import CALIBRATED, Admission, AttemptRecord, Family
from ablate.experiments.reporting.outlook import outlook, to_continue
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
            match = re.search(r"probably ([\d.,]+)\W%\s(higher|lower)\W+([\d.,]+) to ([\d.,]+)", line)
            assert match is not None, line
            size, low, high = (float(match[place].replace(",", "")) for place in (1, 3, 4))
            ends = sorted(map(abs, (primary.ci_low_pct, primary.ci_high_pct)))
            assert (size, low, high) == tuple(round(one, 2) for one in (abs(primary.delta_pct), *ends))
            assert match[2] == ("higher" if primary.delta_pct > 0 else "lower")
        if blocks < 8:
            assert f"not publishable: {blocks} of 8 planned blocks counted" in line
    last = [line for line in lines if line.startswith("Continue: ")]
    many = [line for line in lines if "the noise here is larger than such an effect" in line]
    needed = [one.blocks_needed or 0 for one in to_continue(verdict.variants) if one.cause in OPEN]
    assert len(many) == sum(blocks > 80 for blocks in needed)
    assert last == (
        ["Continue: ablate run --continue factory"] if len(to_continue(verdict.variants)) > len(many) else []
    )
    assert len(lines) == len(undecided) + len(last)


@pytest.mark.parametrize(
    ("node_class", "metric", "words"),
    [
        ("cpu", "process_s", "the processor time of a command (metric cpu_s)"),
        ("cpu", "cpu_s", "let the program train for more steps"),
        ("h200", "tokens_per_s", "on a node that nothing else uses"),
    ],
)
def test_noise_that_takes_many_blocks_gets_a_remedy_and_no_command(node_class: str, metric: str, words: str) -> None:
    verdict = judged(1.0, 0.05)
    variant = next(one for one in verdict.variants if one.arm == "psiv-on")
    assert variant.primary is not None
    primary = variant.primary.model_copy(update={"metric": metric})
    changes = {"blocks_needed": 812, "cause": Cause.NOT_PROVED, "primary": primary}
    noisy = variant.model_copy(update=changes)
    lines = outlook(verdict.model_copy(update={"node_class": node_class}), [noisy])
    assert len(lines) == 1
    assert "812" not in lines[0]
    assert words in lines[0]


def test_a_verdict_without_a_service_or_without_doubt_names_no_command() -> None:
    sure = judged(1.2, 0.001)
    assert [one for one in outlook(sure, sure.variants[:1]) if "psiv-on" in one or "Continue" in one] == []
    open_one = judged(1.2, 0.01, admission=UNKNOWN)
    (line, *_rest, last) = outlook(open_one, open_one.variants[:1])
    assert "not publishable: there are no A/A blocks for cpu x." in line
    assert last == "Continue: ablate run --continue factory"
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
