"""Names of runs in MLflow: the object, its verdict and its effect, short enough for one line of a list.

MLflow shows the name as the heading of the run's page. Everything else is in the note.
"""

from collections.abc import Sequence

from experiments.outcomes import Decision
from experiments.reporting import wording
from experiments.reporting.verdict_layout import VariantLayout
from experiments.reporting.view import AblationView

LONGEST_NAME = 60
"""Longest name of a run, in characters. MLflow rejects more than 250."""


def of_ablation(view: AblationView) -> str:
    """Return an ablation's name with its answer or state, for example "psiv-cache: adopt psiv-on +2.49 %; reject 2"."""
    if view.answer is None:
        return ending_in(view.name, f": {view.state}")
    *fuller, shortest = _answers(view.answer.variants)
    room = LONGEST_NAME - len(f"{view.name}: ")
    return ending_in(view.name, f": {next((one for one in fuller if len(one) <= room), shortest)}")


def of_variant(variant: VariantLayout) -> str:
    """Return a variant's name with verdict and effect, for example "psiv-on: better +2.49 %"."""
    return ending_in(variant.arm, f": {_with_effect(variant.word.text, variant)}")


def ending_in(name: str, end: str = "") -> str:
    """Return `name` and `end`; `name` is cut if both are too long together."""
    return f"{wording.shorten(name, LONGEST_NAME - len(end))}{end}"


def _answers(variants: Sequence[VariantLayout]) -> tuple[str, str, str]:
    """Return the answer in three lengths: all decisions; the first with its best variant; without its name."""
    groups = [own for word in Decision if (own := [v for v in variants if v.decision.text == word])]
    first, *others = groups
    best = first[0]
    more = f" {'or' if best.decision.text == Decision.ADOPT else 'and'} {len(first) - 1} more" if len(first) > 1 else ""
    named = f"{_with_effect(f'{best.decision.text} {best.arm}', best)}{more}"
    counts = [f"{other[0].decision.text} {len(other)}" for other in others]
    return "; ".join([named, *counts]), named, f"{_with_effect(best.decision.text, best)}{more}"


def _with_effect(text: str, variant: VariantLayout) -> str:
    return text if variant.effect.text == wording.NOTHING else f"{text} {variant.effect.text}"
