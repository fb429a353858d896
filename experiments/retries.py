"""Retries and budgets: which failures break a block, when it runs again, and when no more blocks start.

The service and a node without a service follow the same rule, so an import keeps the decisions of an air-gapped run.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import NamedTuple

from ablate.experiments.outcomes import FailureClass


class RetryRule(NamedTuple):
    """Retries of a block whose attempts end by one failure class."""

    attempts: int
    """Attempts at one block that may end by this class, which then becomes final. Each class counts separately."""
    rests_s: tuple[float, ...] = (0.0,)
    """Seconds that the block waits after its first, second, ... such attempt; the last value repeats."""
    elsewhere: bool = False
    """Whether the next attempt should run on another node."""


RETRY_RULES: dict[FailureClass, RetryRule] = {
    FailureClass.USER_ERROR: RetryRule(1),
    FailureClass.OOM: RetryRule(1),
    FailureClass.NUMERICS: RetryRule(1),
    FailureClass.OUTPUT_LIMIT: RetryRule(1),
    FailureClass.GATE_REFUSED: RetryRule(1),
    FailureClass.INFRA_NODE: RetryRule(5, (0.0, 2.0, 4.0, 8.0, 16.0), elsewhere=True),
    FailureClass.INFRA_CONTROL: RetryRule(5, (1.0, 2.0, 4.0, 8.0, 16.0)),
    FailureClass.PREEMPTED: RetryRule(10),
    FailureClass.TIMEOUT: RetryRule(2),
    FailureClass.CANCELLED: RetryRule(1),
    FailureClass.INVALID_MEASUREMENT: RetryRule(3, (2.0, 15.0), elsewhere=True),
    FailureClass.DISTURBED: RetryRule(10, (1.0, 2.0, 4.0, 8.0, 15.0), elsewhere=True),
    FailureClass.NO_RECEIPT: RetryRule(3, (0.0, 4.0), elsewhere=True),
}

SPEAKS_AGAINST_NODE = frozenset({FailureClass.INFRA_NODE, FailureClass.NO_RECEIPT})
"""Classes that indicate a bad node when they repeat there over different work."""

FINAL_WITH_RECEIPT = frozenset(
    {
        FailureClass.OOM,
        FailureClass.NUMERICS,
        FailureClass.GATE_REFUSED,
        FailureClass.OUTPUT_LIMIT,
        FailureClass.USER_ERROR,
    }
)
"""Classes that are a result of the arm, not of the node: the block counts, and the receipt records the failure."""


class FinalWhen(Enum):
    """Earlier breaks of a class that count towards making it a result of the arm."""

    ARM = auto()
    """Breaks by the same arm in any block of the ablation."""
    BLOCK = auto()
    """Breaks of the same block by any arm."""
    ARM_IN_BLOCK = auto()
    """Breaks by the same arm in the same block."""


FINAL_WHEN_REPEATED: dict[FailureClass, FinalWhen] = {
    FailureClass.TIMEOUT: FinalWhen.ARM,
    FailureClass.NO_RECEIPT: FinalWhen.ARM,
    FailureClass.INVALID_MEASUREMENT: FinalWhen.BLOCK,
    FailureClass.INFRA_NODE: FinalWhen.ARM_IN_BLOCK,
}
"""Classes that become a result of the arm at the last allowed attempt."""


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
    repeated = {
        failure
        for failure, scope in FINAL_WHEN_REPEATED.items()
        if _times(broken, Break(block_index, failure, arm), scope) + 1 >= RETRY_RULES[failure].attempts
    }
    return tuple(sorted(FINAL_WITH_RECEIPT | repeated))


def spoiled_by_load(broken: Iterable[Break]) -> frozenset[int]:
    """Return the indices of the blocks that others' load spoiled at every attempt that they may have."""
    counts = Counter(one.block_index for one in broken if one.failure_class is FailureClass.DISTURBED)
    attempts = RETRY_RULES[FailureClass.DISTURBED].attempts
    return frozenset(index for index, number in counts.items() if number >= attempts)


def may_retry(broken: Sequence[Break], last: Break) -> bool:
    """Say whether the block of `last`, the newest of `broken`, may run again."""
    return _times_in_block(broken, last) < RETRY_RULES[last.failure_class].attempts


def attempt_words(broken: Sequence[Break], last: Break) -> str:
    """Return how often the block of `last` ended by its class and may do so, such as "timeout 1 of 2"."""
    return f"{last.failure_class} {_times_in_block(broken, last)} of {RETRY_RULES[last.failure_class].attempts}"


def _times_in_block(broken: Sequence[Break], last: Break) -> int:
    """Count breaks of the block of `last` by its class; by the same arm if the class counts per arm."""
    own = FINAL_WHEN_REPEATED.get(last.failure_class) is FinalWhen.ARM
    return _times(broken, last, FinalWhen.ARM_IN_BLOCK if own else FinalWhen.BLOCK)


def _times(broken: Sequence[Break], like: Break, scope: FinalWhen) -> int:
    return sum(
        one.failure_class is like.failure_class
        and (scope is FinalWhen.ARM or one.block_index == like.block_index)
        and (scope is FinalWhen.BLOCK or one.arm == like.arm)
        for one in broken
    )


def retry_wait_s(broken: Sequence[Break], last: Break) -> float:
    """Return the seconds that the block of `last`, the newest of `broken`, waits before a worker may claim it.

    A node without a service does not wait.
    """
    rests_s = RETRY_RULES[last.failure_class].rests_s
    return rests_s[min(_times(broken, last, FinalWhen.BLOCK), len(rests_s)) - 1]


def budget_spent(used_minutes: float, budget_minutes: float) -> str | None:
    """Say that all attempts, broken ones included, used up the device minutes; None while some are left."""
    if used_minutes < budget_minutes:
        return None
    return f"the budget of {budget_minutes:g} device minutes is used up ({used_minutes:.2f})"
