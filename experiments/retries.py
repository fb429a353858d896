"""Retries and budgets: which failures break a block, when it runs again, and when no more blocks start.

The service and a node without a service follow the same rule, so an import keeps the decisions of an air-gapped run.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ablate.experiments.outcomes import BASELINE, VARIANT, FailureClass, FinalWhen, Outcome

_MAY_BE_CHANCE = (Outcome.MEASURED, Outcome.INVALID)
"""Outcomes in a first block after which the next blocks run."""


class Break(NamedTuple):
    """A broken attempt at a block."""

    block_index: int
    failure_class: FailureClass
    arm: str | None
    """Arm whose trial ended the attempt; None when unknown."""


def final_failures(broken: Sequence[Break], block_index: int, arm: str) -> tuple[FailureClass, ...]:
    """Return the failure classes that would be a result of `arm` if its trial in this block ended by them now.

    `broken` are all broken attempts of the ablation. A trial that ends by another class breaks its block.
    """
    return tuple(
        sorted(
            failure
            for failure in FailureClass
            if failure.rule.is_result or _is_last(broken, Break(block_index, failure, arm), failure.rule.final_when)
        )
    )


def _is_last(broken: Sequence[Break], next_break: Break, scope: FinalWhen | None) -> bool:
    """Return whether `next_break` makes its class a result of the arm."""
    if scope is None:
        return False
    return _times(broken, next_break, scope) + 1 >= next_break.failure_class.rule.attempts


def may_retry(broken: Sequence[Break], last: Break) -> bool:
    """Say whether the block of `last`, the newest of `broken`, may run again."""
    return _times_in_block(broken, last) < last.failure_class.rule.attempts


def attempt_words(broken: Sequence[Break], last: Break) -> str:
    """Return how often the block of `last` ended by its class and may do so, such as "timeout 1 of 2"."""
    return f"{last.failure_class} {_times_in_block(broken, last)} of {last.failure_class.rule.attempts}"


def _times_in_block(broken: Sequence[Break], last: Break) -> int:
    """Count breaks of the block of `last` by its class; by the same arm if the class counts per arm."""
    own = last.failure_class.rule.final_when is FinalWhen.ARM
    return _times(broken, last, FinalWhen.ARM_IN_BLOCK if own else FinalWhen.BLOCK)


def _times(broken: Sequence[Break], like: Break, scope: FinalWhen) -> int:
    return sum(
        one.failure_class is like.failure_class
        and (scope is FinalWhen.ARM or one.block_index == like.block_index)
        and (scope is FinalWhen.BLOCK or one.arm == like.arm)
        for one in broken
    )


def retry_wait_s(broken: Sequence[Break], last: Break) -> float:
    """Return the seconds that the block of `last`, the newest of `broken`, waits before it runs again."""
    rests_s = last.failure_class.rule.rests_s
    return rests_s[min(_times(broken, last, FinalWhen.BLOCK), len(rests_s)) - 1]


def budget_spent(used_minutes: float, budget_minutes: float) -> str | None:
    """Say that all attempts, broken ones included, used up the device minutes; None while some are left."""
    if used_minutes < budget_minutes:
        return None
    return f"the budget of {budget_minutes:g} device minutes is used up ({used_minutes:.2f})"


class TrialEnd(NamedTuple):
    """How a trial ended."""

    arm: str
    role: str
    outcome: str
    message: str


def nothing_to_compare(first_block: Sequence[TrialEnd]) -> tuple[str, str] | None:
    """Return (who failed and how, why), if the first block to end leaves nothing to compare; None if it does not.

    One trial without a measurement keeps its variant from every verdict. The judge spares one baseline of six that
    failed alone, but a program that fails in its first block mostly fails in every one.
    """
    failed = sorted(
        (end for end in first_block if end.outcome not in _MAY_BE_CHANCE), key=lambda end: end.role != BASELINE
    )
    variants = {end in failed for end in first_block if end.role == VARIANT}
    if variants != {True} and not any(end.role == BASELINE for end in failed):
        return None
    alike = len(failed) == len(first_block) and len({end.message for end in failed}) == 1
    who = "every arm" if alike else failed[0].arm
    return f"{who} {failed[0].outcome} in the first block", failed[0].message
