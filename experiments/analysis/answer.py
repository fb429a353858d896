"""Answer: the word of one variant with its cause and reason, and the decision that the rule draws from it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.analysis.verdicts import Cause, Comparison, RequirementResult
from experiments.analysis.words import gain_pct
from experiments.design.spec import Primary
from experiments.outcomes import Decision, VerdictWord

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
