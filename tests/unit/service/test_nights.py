"""What a night of `ablate nightly` says, from the words of its one or two ablations."""

from pathlib import Path

import pytest

from ablate.experiments.analysis.verdicts import Cause, VariantVerdict, Verdict
from ablate.experiments.outcomes import Decision, VerdictWord
from ablate.service.cli.commits.nights import NightChange, NightWord, answer_of, change_of
from tests.cli import ablate

WORDS = [
    (VerdictWord.BETTER, None),
    (VerdictWord.SAME, None),
    (VerdictWord.WORSE, None),
    (VerdictWord.INCONCLUSIVE, Cause.NOT_PROVED),
    (VerdictWord.INCONCLUSIVE, Cause.NOISE),
    (VerdictWord.INCONCLUSIVE, Cause.UNCALIBRATED),
    (VerdictWord.INCONCLUSIVE, Cause.MISSING),
    (VerdictWord.INVALID, None),
    (VerdictWord.FAILED, None),
]
NO_NUMBERS = WORDS[-4:]


def verdict(**words: tuple[VerdictWord, Cause | None]) -> Verdict:
    variants = tuple(
        VariantVerdict(
            arm=arm,
            verdict=word,
            measured=word,
            cause=cause,
            reason=arm,
            decision=Decision.SAME,
            primary=None,
            gates_live="",
        )
        for arm, (word, cause) in words.items()
    )
    return Verdict.model_construct(variants=variants)


@pytest.mark.parametrize("pinned", WORDS)
@pytest.mark.parametrize("accepted", WORDS)
def test_a_night_asks_again_only_if_an_earlier_commit_is_better(
    accepted: tuple[VerdictWord, Cause | None], pinned: tuple[VerdictWord, Cause | None]
) -> None:
    answer = answer_of(verdict(accepted=accepted, pinned=pinned), None)
    if VerdictWord.BETTER in (accepted[0], pinned[0]):
        assert answer is None
    else:
        assert answer is not None
        neither = accepted in NO_NUMBERS and pinned in NO_NUMBERS
        assert answer.word is (NightWord.UNANSWERED if neither else NightWord.ACCEPTED)


@pytest.mark.parametrize("pinned", WORDS)
@pytest.mark.parametrize("accepted", WORDS)
def test_only_a_second_better_confirms(
    accepted: tuple[VerdictWord, Cause | None], pinned: tuple[VerdictWord, Cause | None]
) -> None:
    first = verdict(accepted=WORDS[0], pinned=WORDS[0])
    answer = answer_of(first, verdict(accepted=accepted, pinned=pinned))
    assert answer is not None
    better = [arm for arm, word in (("accepted", accepted), ("pinned", pinned)) if word[0] is VerdictWord.BETTER]
    neither = accepted in NO_NUMBERS and pinned in NO_NUMBERS
    assert answer.word is (NightWord.WORSE if better else NightWord.UNANSWERED if neither else NightWord.ACCEPTED)
    if better:
        assert [one.arm for one in answer.variants] == better


def test_a_change_is_that_of_the_new_commit() -> None:
    """An earlier commit that is 25 % above the new one: the new one is 20 % below it."""

    class Primary:
        delta_pct, ci_low_pct, ci_high_pct = 25.0, 0.0, 100.0

    one = VariantVerdict.model_construct(primary=Primary(), exact=None)
    assert change_of(one) == NightChange(change_pct=-20.0, low_pct=-50.0, high_pct=0.0)
    assert change_of(VariantVerdict.model_construct(primary=None, exact=None)) is None


def test_listed_seeds_are_refused_because_a_second_ablation_would_repeat_them(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        "ablation: a\nworkload: {command: [x], code: .}\ndesign: {seeds: [1, 2]}\nverdict: {require: [1]}\n"
    )
    done = ablate("nightly", spec, "--pin", "v0")
    assert done.code == 5
    assert "the spec's requirements do not count" in done.err
    assert "would repeat the runs of the first" in done.err
    assert "seeds: 2" in done.err
