"""Words and sentences: what corrected numbers say by the rule's margin, and how it is said."""

from typing import TYPE_CHECKING

from experiments.analysis.verdicts import Comparison
from experiments.design.metrics import METRICS
from experiments.outcomes import VerdictWord

if TYPE_CHECKING:
    from experiments.design.spec import Primary


def word_of(found: Comparison, primary: "Primary") -> VerdictWord:
    """Return what the samples say.

    Better or worse: different from zero after correction, and the estimate beyond the margin. Same: proved to lie
    within the margin after correction. Else inconclusive.
    """
    gain = gain_pct(found)
    if found.p_holm <= found.alpha and abs(gain) > primary.margin:
        return VerdictWord.BETTER if gain > 0 else VerdictWord.WORSE
    return VerdictWord.SAME if found.p_same <= found.alpha else VerdictWord.INCONCLUSIVE


def beyond_margin(found: Comparison, primary: "Primary") -> bool:
    """Return whether the whole interval lies beyond the margin."""
    return found.ci_low_pct > primary.margin or found.ci_high_pct < -primary.margin


def gain_pct(found: Comparison) -> float:
    """Return the change as improvement: positive is better, whatever the metric's direction."""
    return found.delta_pct if METRICS[found.metric].better == "higher" else -found.delta_pct


def describe(found: Comparison) -> str:
    """Write a comparison in one phrase, for example "tokens_per_s +2.41 % [+1.90, +2.92] over 6 blocks"."""
    interval = f"[{found.ci_low_pct:+.2f}, {found.ci_high_pct:+.2f}]"
    return f"{found.metric} {found.delta_pct:+.2f} % {interval} over {found.blocks} blocks"


def sentence(word: VerdictWord, found: Comparison, primary: "Primary") -> str:
    """Say what the numbers are and which test they passed."""
    return f"{describe(found)}: {_why(word, found, primary)}"


def _why(word: VerdictWord, found: Comparison, primary: "Primary") -> str:
    margin = f"the margin of {primary.margin:g} %"
    if word is VerdictWord.SAME:
        return f"proved to lie within {margin} by two one-sided tests (p {found.p_same:.2g})"
    if word is VerdictWord.INCONCLUSIVE:
        return f"neither a difference nor sameness within {margin} is proved"
    if beyond_margin(found, primary):
        return f"{word} by more than {margin}, the whole interval lies beyond it"
    return f"{word}: different from zero (p {found.p_holm:.2g}), the estimate beyond {margin}, its interval not"
