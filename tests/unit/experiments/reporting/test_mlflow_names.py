"""Names of runs in MLflow fit a heading, and hold the answer's word and effect whatever is drawn for the rest."""

import dataclasses
import random
import string

import pytest

from ablate.experiments.outcomes import AblationState, Decision, VerdictWord
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.mlflow import content
from ablate.experiments.reporting.mlflow.parent import parent
from ablate.experiments.reporting.mlflow.runs import children
from ablate.experiments.reporting.table import Cell
from ablate.experiments.reporting.verdict_layout import VariantLayout
from ablate.experiments.reporting.view import AblationView
from tests import views

SPACE = "\N{NO-BREAK SPACE}"
LONGEST = "n" * 63
"""What a spec allows."""


@pytest.fixture(scope="module")
def view() -> AblationView:
    return views.view(num_blocks=6, timed=4)


def named(view: AblationView, name: str, *variants: tuple[str, Decision, str]) -> str:
    """Return an ablation's name with these variants: arm, decision, effect."""
    assert view.answer is not None
    like = view.answer.variants[0]
    made = tuple(
        dataclasses.replace(like, arm=arm, decision=Cell(text=str(decision)), effect=Cell(text=effect))
        for arm, decision, effect in variants
    )
    changed = dataclasses.replace(view, name=name)
    vars(changed)["answer"] = dataclasses.replace(view.answer, variants=made)  # where the cached property lives
    return content.ablation_name(changed)


def test_one_variant_and_several(view: AblationView) -> None:
    adopt, same, reject = Decision.ADOPT, Decision.SAME, Decision.REJECT
    up, none, down = "+2.49 %", "+0.01 %", "-9.00 %"
    assert named(view, "cache", ("on", adopt, up)) == "cache: adopt on +2.49 %"
    two = (("on", adopt, up), ("more", adopt, none))
    assert named(view, "cache", *two, ("bad", reject, down)) == "cache: adopt on +2.49 % or 1 more; reject 1"
    assert named(view, "cache", ("a", reject, none), ("b", reject, down)) == "cache: reject a +0.01 % and 1 more"
    assert named(view, "cache", ("a", reject, up), ("b", same, none)) == "cache: reject a +2.49 %; same 1"
    assert named(view, "cache", ("a", Decision.INVALID, wording.NOTHING)) == "cache: invalid a"


def test_what_does_not_fit_is_left_out_from_the_end(view: AblationView) -> None:
    adopt = ("chunk-8", Decision.ADOPT, "-19.89 %")
    rest = (("a", Decision.REJECT, "+1.00 %"), ("b", Decision.INVALID, wording.NOTHING))
    assert named(view, "n" * 12, adopt, *rest) == f"{'n' * 12}: adopt chunk-8 -19.89 %; reject 1; invalid 1"
    assert named(view, "n" * 30, adopt, *rest) == f"{'n' * 30}: adopt chunk-8 -19.89 %"
    assert named(view, "n" * 40, adopt, *rest) == f"{'n' * 40}: adopt -19.89 %"
    assert named(view, LONGEST, adopt, *rest) == f"{'n' * 43}\N{HORIZONTAL ELLIPSIS}: adopt -19.89 %"


def test_every_name_is_short_and_says_verdict_and_effect_of_the_best(view: AblationView) -> None:
    chance = random.Random(20261123)  # noqa: S311 - draws for a test
    for _ in range(300):
        variants = [drawn(chance) for _ in range(chance.randint(1, 12))]
        name = named(view, drawn_name(chance), *variants)
        first = min(variants, key=lambda variant: list(Decision).index(variant[1]))
        assert len(name) <= content.LONGEST_NAME
        text = name.partition(": ")[2]
        assert text.split()[0] == first[1]
        assert first[2] == wording.NOTHING or first[2] in text


def drawn_name(chance: random.Random) -> str:
    return "".join(chance.choices(string.ascii_lowercase, k=chance.randint(1, 63)))


def drawn(chance: random.Random) -> tuple[str, Decision, str]:
    effect = wording.NOTHING if chance.random() < 0.2 else wording.percent(chance.uniform(-100, 1000))
    return drawn_name(chance), chance.choice(list(Decision)), effect


@pytest.mark.parametrize("state", [AblationState.CANCELLING, AblationState.FAILED])
def test_without_an_answer_the_state_is_said(state: AblationState) -> None:
    whole = views.unfinished(state)
    assert content.ablation_name(whole) == f"psiv-cache: {state}"
    cut = content.ablation_name(dataclasses.replace(whole, name=LONGEST))
    assert (len(cut), cut.endswith(f"\N{HORIZONTAL ELLIPSIS}: {state}")) == (60, True)


def test_a_variant_says_its_verdict_and_effect(view: AblationView) -> None:
    names = {layout.arm: content.variant_name(layout) for layout in layouts(view)}
    assert names["psiv-on"] == f"psiv-on: better +2.49{SPACE}%"
    assert names["tma"] == f"tma: {VerdictWord.REFUSED}"
    long = content.variant_name(dataclasses.replace(layouts(view)[0], arm=LONGEST))
    assert (len(long), long.endswith(f"\N{HORIZONTAL ELLIPSIS}: better +2.49{SPACE}%")) == (60, True)


def layouts(view: AblationView) -> tuple[VariantLayout, ...]:
    assert view.answer is not None
    return view.answer.variants


def test_every_run_of_an_ablation_with_the_longest_names_is_short() -> None:
    arms = {name if name == "baseline" else name.ljust(63, "x"): own for name, own in views.EFFECTS.items()}
    whole = dataclasses.replace(views.view(arms=arms, num_blocks=6, timed=4), name=LONGEST)
    shown = [run.name for run in (parent(whole, ""), *children(whole))]
    assert max(map(len, shown)) == content.LONGEST_NAME
    assert len(set(shown)) == len(shown)
