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

    Better or worse: the whole interval lies beyond the margin. Same: proved to lie within the margin after correction.
    Otherwise inconclusive.
    """
    if _beyond_margin(comparison, primary):
        return VerdictWord.BETTER if gain_pct(comparison) > 0 else VerdictWord.WORSE
    return VerdictWord.SAME if comparison.p_same <= comparison.alpha else VerdictWord.INCONCLUSIVE


def open_cause(comparison: Comparison) -> Cause:
    """Return what is known of a change that is proved neither beyond the margin nor within it."""
    if comparison.p_holm > comparison.alpha:
        return Cause.NOT_PROVED
    return Cause.ABOVE_ZERO if gain_pct(comparison) > 0 else Cause.BELOW_ZERO


def _beyond_margin(comparison: Comparison, primary: "Primary") -> bool:
    """Return whether the whole interval lies beyond the margin, on a side that the samples can prove."""
    beyond = comparison.ci_low_pct > primary.margin_pct or comparison.ci_high_pct < -primary.margin_pct
    return beyond and comparison.p_holm <= comparison.alpha


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
        return f"{comparison.blocks} {comparison.unit}"
    change = comparison.delta_pct / 100 * unit_of_shares(comparison.baseline)
    unit = METRICS[comparison.metric].unit
    return f"{comparison.blocks} {comparison.unit} ({change:+.4g} {unit} from a mean of {comparison.baseline:.5g})"


def _why(word: VerdictWord, comparison: Comparison, primary: "Primary") -> str:
    margin = f"the margin of {primary.margin_pct:.4g} %"
    if word is VerdictWord.SAME:
        return f"proved to lie within {margin} by two one-sided tests (p {comparison.p_same:.2g})"
    if word is not VerdictWord.INCONCLUSIVE:
        return f"{word} by more than {margin}, the whole interval lies beyond it"
    cause = open_cause(comparison)
    if cause is Cause.NOT_PROVED:
        return f"neither a difference nor sameness within {margin} is proved"
    return f"{cause} of {primary.margin_pct:.4g} % (p {comparison.p_holm:.2g} that it is zero)"


FEW_SAMPLES = 12
"""Blocks or seeds below which the first line on a good variant says what they cannot exclude."""


def bad_runs(samples: int, unit: str) -> str:
    """Say what share of bad runs so many blocks or seeds without one cannot exclude, at 95 %."""
    share = 1 - 0.05 ** (1 / samples)
    return f"{samples} {unit} do not exclude that up to {100 * share:.0f} % of this arm's runs are far worse than these"


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


def as_measured(word: VerdictWord, reason: str, cause: Cause = Cause.NOT_PROVED) -> Answer:
    """Return the answer that publishes the verdict of the samples; `cause` is for an inconclusive one."""
    return Answer(
        measured=word, published=word, cause=cause if word is VerdictWord.INCONCLUSIVE else None, reason=reason
    )


def undecided(cause: Cause, reason: str) -> Answer:
    """Return `inconclusive` as the verdict of the samples too."""
    word = VerdictWord.INCONCLUSIVE
    missing = reason if cause is Cause.MISSING else None
    return Answer(measured=word, published=word, cause=cause, reason=f"{cause}: {reason}", missing=missing)


def capped(answer: Answer, cause: Cause, reason: str | None) -> Answer:
    """Publish `inconclusive` instead of what the samples prove if there is a `reason`; their verdict is kept."""
    proves = answer.published is not VerdictWord.INCONCLUSIVE or answer.cause in (Cause.ABOVE_ZERO, Cause.BELOW_ZERO)
    if reason is None or not proves:
        return answer
    why = f"{cause}: {reason}; the samples say '{answer.measured}': {answer.reason}"
    return Answer(measured=answer.measured, published=VerdictWord.INCONCLUSIVE, cause=cause, reason=why)


def with_broken_requirements(answer: Answer, requirements: Sequence[RequirementResult]) -> Answer:
    """Put failed exact requirements before the reason."""
    failed = [f"{result.metric} {result.rule} is not met: {result.detail}" for result in _failed_exactly(requirements)]
    return replace(answer, reason="; ".join([*failed, answer.reason]))


def adopt_or_reject(comparison: Comparison | None, rule: "Primary") -> Decision:
    """Return the decision on a better variant that meets every requirement: its estimate must reach the threshold."""
    enough = comparison is not None and gain_pct(comparison) >= rule.threshold_pct
    return Decision.ADOPT if enough else Decision.REJECT


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
