"""A verdict in a few words, for lists: the best variant's word and effect."""

from experiments.analysis.verdicts import Verdict
from experiments.reporting import wording
from experiments.reporting.verdict_layout import lay_out


def short_answer(verdict: Verdict) -> str:
    """Return for example "chunk-8 better, +12.30 % throughput, and 3 more"; the page and `verdict` say the rest."""
    layout = lay_out(verdict)
    first, *others = layout.variants
    metric = wording.metric(layout.rule.metric)
    effect = [] if first.effect.text == wording.NOTHING else [f"{first.effect.text} {metric}"]
    more = [f"and {len(others)} more"] if others else []
    lacks = f": {first.missing}" if first.missing else ""
    return ", ".join([f"{first.arm} {first.word.text}", *effect, *more]) + lacks
