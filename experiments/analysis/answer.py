"""The answer on one variant: verdict, cause and reason, and the decision that the rule draws from them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ablate.experiments.analysis.verdicts import Cause, Comparison, RequirementResult, unit_of_shares
from ablate.experiments.design.metrics import METRICS
from ablate.experiments.outcomes import Decision, VerdictWord

if TYPE_CHECKING:
    from ablate.experiments.design.verdict_rule import Primary


def word_of(comparison: Comparison, primary: "Primary") -> VerdictWord:
    """Return the verdict of the samples.

    Better or worse: the difference is significant after correction, and the estimate exceeds the margin. Same: proved
    to lie within the margin after correction. Otherwise inconclusive.
    """
    gain = gain_pct(comparison)
    if comparison.p_holm <= comparison.alpha and abs(gain) > primary.margin_pct:
        return VerdictWord.BETTER if gain > 0 else VerdictWord.WORSE
    return VerdictWord.SAME if comparison.p_same <= comparison.alpha else VerdictWord.INCONCLUSIVE


def beyond_margin(comparison: Comparison, primary: "Primary") -> bool:
    """Return whether the whole interval lies beyond the margin."""
    return comparison.ci_low_pct > primary.margin_pct or comparison.ci_high_pct < -primary.margin_pct


def gain_pct(comparison: Comparison) -> float:
    """Return the change as improvement in percent: positive is better, in either direction of the metric."""
    better = comparison.better or METRICS[comparison.metric].better
    return comparison.delta_pct if better == "higher" else -comparison.delta_pct


def sentence(word: VerdictWord, comparison: Comparison, primary: "Primary") -> str:
    """Return the numbers and the proof, for example "tokens_per_s +2.41 % [+1.90, +2.92] over 6 blocks: ..."."""
    interval = f"[{comparison.ci_low_pct:+.2f}, {comparison.ci_high_pct:+.2f}]"
    numbers = f"{comparison.metric} {comparison.delta_pct:+.2f} % {interval} over {samples(comparison)}"
    return f"{numbers}: {_why(word, comparison, primary)}"


def samples(comparison: Comparison) -> str:
    """Return the number of samples, for example "6 blocks", or "12 seeds, a mean of 2.104 nats + 0.0312"."""
    if comparison.baseline is None:
        return f"{comparison.blocks} blocks"
    change = comparison.delta_pct / 100 * unit_of_shares(comparison.baseline)
    unit = METRICS[comparison.metric].unit
    return f"{comparison.blocks} seeds ({change:+.4g} {unit} from a mean of {comparison.baseline:.5g})"


def _why(word: VerdictWord, comparison: Comparison, primary: "Primary") -> str:
    margin = f"the margin of {primary.margin_pct:.4g} %"
    if word is VerdictWord.SAME:
        return f"proved to lie within {margin} by two one-sided tests (p {comparison.p_same:.2g})"
    if word is VerdictWord.INCONCLUSIVE:
        return f"neither a difference nor sameness within {margin} is proved"
    if beyond_margin(comparison, primary):
        return f"{word} by more than {margin}, the whole interval lies beyond it"
    proof = f"different from zero (p {comparison.p_holm:.2g})"
    return f"{word}: {proof}, the estimate is beyond {margin}, the whole interval is not"


_DECISIONS = {
    VerdictWord.INCONCLUSIVE: Decision.INCONCLUSIVE,
    VerdictWord.INVALID: Decision.INVALID,
    VerdictWord.REFUSED: Decision.INVALID,
    VerdictWord.WORSE: Decision.REJECT,
    VerdictWord.OOM: Decision.REJECT,
    VerdictWord.TIMEOUT: Decision.REJECT,
    VerdictWord.FAILED: Decision.REJECT,
}
"""Decisions that follow from the verdict alone."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer on one variant."""

    measured: VerdictWord
    """The verdict of the samples alone."""
    published: VerdictWord
    cause: Cause | None
    """Why the published verdict is `inconclusive`; None for other verdicts."""
    reason: str
    missing: str | None = None
    """Which blocks are missing, if that is the cause."""


def as_measured(word: VerdictWord, reason: str) -> Answer:
    """Return the answer that publishes the verdict of the samples."""
    cause = Cause.NOT_PROVED if word is VerdictWord.INCONCLUSIVE else None
    return Answer(measured=word, published=word, cause=cause, reason=reason)


def undecided(cause: Cause, reason: str) -> Answer:
    """Return `inconclusive` as the verdict of the samples too."""
    word = VerdictWord.INCONCLUSIVE
    missing = reason if cause is Cause.MISSING else None
    return Answer(measured=word, published=word, cause=cause, reason=f"{cause}: {reason}", missing=missing)


def capped(answer: Answer, cause: Cause, reason: str | None) -> Answer:
    """Publish `inconclusive` instead if there is a `reason`; the samples' verdict is kept."""
    if reason is None or answer.published is VerdictWord.INCONCLUSIVE:
        return answer
    why = f"{cause}: {reason}; the samples say '{answer.measured}': {answer.reason}"
    return Answer(measured=answer.measured, published=VerdictWord.INCONCLUSIVE, cause=cause, reason=why)


def with_broken_requirements(answer: Answer, requirements: Sequence[RequirementResult]) -> Answer:
    """Put failed exact requirements before the reason."""
    failed = [f"{result.metric} {result.rule} is not met: {result.detail}" for result in _failed_exactly(requirements)]
    return replace(answer, reason="; ".join([*failed, answer.reason]))


def adopt_or_reject(comparison: Comparison | None, rule: "Primary") -> Decision:
    """Return the decision on a better variant that meets every requirement.

    `adopt` needs an estimate from the threshold on, and the whole interval beyond the margin: a true effect at the
    margin is adopted as rarely as the level says, not in half of all cases. Without the second, nothing is decided.
    """
    if comparison is None or gain_pct(comparison) < rule.threshold_pct:
        return Decision.REJECT
    return Decision.ADOPT if beyond_margin(comparison, rule) else Decision.INCONCLUSIVE


def decide(word: VerdictWord, when_met: Decision, requirements: Sequence[RequirementResult]) -> Decision:
    """Return the decision of the rule: `when_met` for a better variant that meets every requirement.

    A failed exact requirement rejects a variant with any verdict. Without proof that every requirement is met, or that
    one is not, nothing is decided.
    """
    if _failed_exactly(requirements):
        return Decision.REJECT
    if word in _DECISIONS:
        return _DECISIONS[word]
    if any(not requirement.passed and not requirement.undecided for requirement in requirements):
        return Decision.REJECT
    if any(requirement.undecided for requirement in requirements):
        return Decision.INCONCLUSIVE
    return Decision.SAME if word is VerdictWord.SAME else when_met


def _failed_exactly(requirements: Sequence[RequirementResult]) -> list[RequirementResult]:
    return [result for result in requirements if result.exact and not result.passed]
