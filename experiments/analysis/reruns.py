"""Reruns as evidence: attempts that broke, and whether an arm may have chosen which of its trials count."""

from collections.abc import Sequence

from experiments.block_numbers import block_name
from experiments.outcomes import FailureClass
from experiments.records.circumstances import AttemptRecord

_BY_THE_ARM = frozenset(
    {FailureClass.TIMEOUT, FailureClass.NO_RECEIPT, FailureClass.OOM, FailureClass.NUMERICS, FailureClass.USER_ERROR}
)
"""What an arm's own run ends by: its slow trials may be those that ended, and the rerun the lucky ones."""
_FROM_OUTSIDE = frozenset({FailureClass.INVALID_MEASUREMENT, FailureClass.INFRA_NODE})
"""What comes from outside as a rule: a guard's hit, a device that failed, a process that somebody killed."""
HITS_BY_CHANCE = 1
"""More of these in one arm than in the other that are put down to chance."""


def caused_by(attempts: Sequence[AttemptRecord], variant: str, baseline: str) -> str | None:
    """Return the reruns that one of two compared arms may have caused, or None.

    One trial that ended by itself is enough. What comes from outside counts when one arm has at least two more of it
    than the other.
    """
    own = [attempt for attempt in attempts if attempt.arm in (variant, baseline)]
    ended = [attempt for attempt in own if attempt.failure_class in _BY_THE_ARM]
    if ended:
        return _told(ended)
    hits = [attempt for attempt in own if attempt.failure_class in _FROM_OUTSIDE]
    uneven = abs(sum(1 if hit.arm == variant else -1 for hit in hits))
    return _told(hits) if uneven > HITS_BY_CHANCE else None


def _told(attempts: Sequence[AttemptRecord]) -> str:
    first = attempts[0]
    what = f"attempt {first.number} at {block_name(first.block_index)} ended with arm '{first.arm}'"
    more = f", and {len(attempts) - 1} more like it" if len(attempts) > 1 else ""
    return f"{what} ({first.failure_class}: {first.message}){more}"
