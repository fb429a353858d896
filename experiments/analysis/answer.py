"""Answer: the word of one variant with its cause and reason, and the decision that the rule draws from it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from experiments.analysis.verdicts import Cause, Comparison, RequirementResult
from experiments.design.metrics import METRICS
from experiments.design.spec import Primary
from experiments.outcomes import Decision, VerdictWord

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


_DECISIONS = {
    VerdictWord.INCONCLUSIVE: Decision.INCONCLUSIVE,
    VerdictWord.INVALID: Decision.INVALID,
    VerdictWord.REFUSED: Decision.INVALID,
    VerdictWord.WORSE: Decision.REJECT,
    VerdictWord.OOM: Decision.REJECT,
    VerdictWord.TIMEOUT: Decision.REJECT,
    VerdictWord.FAILED: Decision.REJECT,
}
"""Decisions that follow from the word alone."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is said of one variant."""

    measured: VerdictWord
    """What the samples alone say."""
    published: VerdictWord
    cause: Cause | None
    """Why the published word is `inconclusive`; None for other words."""
    reason: str
    missing: str | None = None
    """What is missing, where that is the cause."""


def told(word: VerdictWord, reason: str) -> Answer:
    """Publish what was found."""
    cause = Cause.NOT_PROVED if word is VerdictWord.INCONCLUSIVE else None
    return Answer(measured=word, published=word, cause=cause, reason=reason)


def open_because(cause: Cause, reason: str) -> Answer:
    """Say nothing but `inconclusive`: the samples themselves do not allow more."""
    word = VerdictWord.INCONCLUSIVE
    missing = reason if cause is Cause.MISSING else None
    return Answer(measured=word, published=word, cause=cause, reason=f"{cause}: {reason}", missing=missing)


def capped(found: Answer, cause: Cause, reason: str | None) -> Answer:
    """Publish `inconclusive` in place of a word that has a `reason` against it, and keep what was measured."""
    if reason is None or found.published is VerdictWord.INCONCLUSIVE:
        return found
    why = f"{cause}: {reason}; the samples alone say '{found.measured}': {found.reason}"
    return Answer(measured=found.measured, published=VerdictWord.INCONCLUSIVE, cause=cause, reason=why)


def rejected_first(found: Answer, requirements: Sequence[RequirementResult]) -> Answer:
    """Say a failed exact requirement before anything else."""
    failed = [f"{entry.metric} {entry.rule} is not met: {entry.detail}" for entry in _failed_exactly(requirements)]
    return replace(found, reason="; ".join([*failed, found.reason]))


def granted(primary: Comparison | None, rule: Primary) -> Decision:
    """Return what the rule says to do with a better variant that meets every requirement."""
    enough = primary is not None and gain_pct(primary) >= rule.threshold_pct
    return Decision.ADOPT if enough else Decision.REJECT


def decide(word: VerdictWord, when_met: Decision, requirements: Sequence[RequirementResult]) -> Decision:
    """Return what the rule says to do: `when_met` for a better variant that meets every requirement.

    A failed exact requirement rejects whatever the speed does.
    """
    if _failed_exactly(requirements):
        return Decision.REJECT
    fixed = _DECISIONS.get(word)
    if fixed is not None:
        return fixed
    if not all(requirement.passed for requirement in requirements):
        return Decision.REJECT
    return Decision.SAME if word is VerdictWord.SAME else when_met


def _failed_exactly(requirements: Sequence[RequirementResult]) -> list[RequirementResult]:
    return [entry for entry in requirements if entry.exact and not entry.passed]
