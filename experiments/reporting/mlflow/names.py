"""Names of runs in MLflow: what it is, the answer's word and its effect, short enough for a line of a list.

MLflow shows a run's name as the heading of its page, where more would fill the first screen. All else is in the note.
"""

from collections.abc import Sequence

from experiments.outcomes import Decision
from experiments.reporting import wording
from experiments.reporting.verdict_layout import VariantLayout
from experiments.reporting.view import AblationView

LONGEST_NAME = 60
"""Of a run, in characters. MLflow itself refuses more than 250."""


def of_ablation(view: AblationView) -> str:
    """Name an ablation and its answer, for example "psiv-cache: adopt psiv-on +2.49 %; reject 2"; or its state."""
    if view.answer is None:
        return ending_in(view.name, f": {view.state}")
    *fuller, shortest = _answers(view.answer.variants)
    room = LONGEST_NAME - len(f"{view.name}: ")
    return ending_in(view.name, f": {next((one for one in fuller if len(one) <= room), shortest)}")


def of_variant(variant: VariantLayout) -> str:
    """Name a variant with its word and effect, for example "psiv-on: better +2.49 %"."""
    return ending_in(variant.arm, f": {_with_effect(variant.word.text, variant)}")


def ending_in(what: str, end: str = "") -> str:
    """Cut `what` where the whole would be too long; the `end` stays whole."""
    return f"{wording.shorten(what, LONGEST_NAME - len(end))}{end}"


def _answers(variants: Sequence[VariantLayout]) -> tuple[str, str, str]:
    """Return the answer in ever fewer words: all decisions; the first with its best variant; without its name."""
    groups = [found for word in Decision if (found := [v for v in variants if v.decision.text == word])]
    first, *others = groups
    best = first[0]
    more = f" {'or' if best.decision.text == Decision.ADOPT else 'and'} {len(first) - 1} more" if len(first) > 1 else ""
    named = f"{_with_effect(f'{best.decision.text} {best.arm}', best)}{more}"
    counts = [f"{other[0].decision.text} {len(other)}" for other in others]
    return "; ".join([named, *counts]), named, f"{_with_effect(best.decision.text, best)}{more}"


def _with_effect(said: str, variant: VariantLayout) -> str:
    return said if variant.effect.text == wording.NOTHING else f"{said} {variant.effect.text}"
