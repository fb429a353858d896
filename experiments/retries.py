"""The rule of retries and budgets: what breaks a block, when it is run again, and when nothing more is started.

A service and a node without one follow the same rule, so an import keeps what an air-gapped run decided.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from experiments.outcomes import FailureClass


class RetryRule(NamedTuple):
    """What happens to a block whose attempt ended by one class."""

    attempts: int
    """Attempts at one block that may end by this class before it is final. Every class counts alone."""
    rests_s: tuple[float, ...] = (0.0,)
    """How long the block rests after its first, second, ... attempt that ended so; the last one stays."""
    elsewhere: bool = False
    """Whether another node than the one where it broke is the better place for the next attempt."""


RETRY_RULES: dict[FailureClass, RetryRule] = {
    FailureClass.USER_ERROR: RetryRule(1),
    FailureClass.OOM: RetryRule(1),
    FailureClass.NUMERICS: RetryRule(1),
    FailureClass.GATE_REFUSED: RetryRule(1),
    FailureClass.INFRA_NODE: RetryRule(5, (0.0, 2.0, 4.0, 8.0, 16.0), elsewhere=True),
    FailureClass.INFRA_CONTROL: RetryRule(5, (1.0, 2.0, 4.0, 8.0, 16.0)),
    FailureClass.PREEMPTED: RetryRule(10),
    FailureClass.TIMEOUT: RetryRule(2),
    FailureClass.CANCELLED: RetryRule(1),
    FailureClass.INVALID_MEASUREMENT: RetryRule(3, (2.0, 15.0), elsewhere=True),
    FailureClass.NO_RECEIPT: RetryRule(3, (0.0, 4.0), elsewhere=True),
}

SPEAKS_AGAINST_NODE = frozenset({FailureClass.INFRA_NODE, FailureClass.NO_RECEIPT})
"""Classes that can speak against the node: repeated there over different work, they are the node's."""

FINAL_WITH_RECEIPT = frozenset(
    {FailureClass.OOM, FailureClass.NUMERICS, FailureClass.GATE_REFUSED, FailureClass.USER_ERROR}
)
"""Classes that are a result of the arm, not of the node: the block counts, with a receipt that says so."""


class FinalWhen(Enum):
    """Which earlier breaks of a class count when it becomes a result of an arm."""

    ARM = auto()
    """Those of the same arm, in whatever block of the ablation."""
    BLOCK = auto()
    """Those of the same block, by whatever arm."""
    ARM_IN_BLOCK = auto()
    """Those of the same arm in the same block."""


FINAL_WHEN_REPEATED: dict[FailureClass, FinalWhen] = {
    FailureClass.TIMEOUT: FinalWhen.ARM,
    FailureClass.NO_RECEIPT: FinalWhen.ARM,
    FailureClass.INVALID_MEASUREMENT: FinalWhen.BLOCK,
    FailureClass.INFRA_NODE: FinalWhen.ARM_IN_BLOCK,
}
"""Classes that are a result of the arm once they come for the last time that they may."""


class Break(NamedTuple):
    """One attempt at a block that broke."""

    block_index: int
    failure_class: FailureClass
    arm: str | None
    """The arm whose trial ended it; None where it cannot be told."""


def final_failures(broken: Sequence[Break], block_index: int, arm: str) -> tuple[FailureClass, ...]:
    """Return the failure classes that are a result of `arm` if its trial in block `block_index` ends so now.

    `broken` are the attempts of the whole ablation that broke. A trial that ends by another class breaks its block.
    """
    repeated = {
        failure
        for failure, scope in FINAL_WHEN_REPEATED.items()
        if _times(broken, Break(block_index, failure, arm), scope) + 1 >= RETRY_RULES[failure].attempts
    }
    return tuple(sorted(FINAL_WITH_RECEIPT | repeated))


def may_retry(broken: Sequence[Break], last: Break) -> bool:
    """Tell whether the block of `last`, which is the newest of `broken`, may run again."""
    return _times_in_block(broken, last) < RETRY_RULES[last.failure_class].attempts


def attempt_words(broken: Sequence[Break], last: Break) -> str:
    """Say how often the block of `last` ended by its class, of how often it may, for example "timeout 1 of 2"."""
    return f"{last.failure_class} {_times_in_block(broken, last)} of {RETRY_RULES[last.failure_class].attempts}"


def _times_in_block(broken: Sequence[Break], last: Break) -> int:
    """Count what ended the block of `last` as it did; where an arm answers for itself, by the same arm."""
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
    """Return how long the block of `last`, which is the newest of `broken`, rests before a worker may claim it again.

    A node without a service does not rest: nobody else waits for it.
    """
    rests_s = RETRY_RULES[last.failure_class].rests_s
    return rests_s[min(_times(broken, last, FinalWhen.BLOCK), len(rests_s)) - 1]


def budget_spent(used_minutes: float, budget_minutes: float) -> str | None:
    """Return the sentence that says so once all attempts, broken ones included, have used the device minutes up."""
    if used_minutes < budget_minutes:
        return None
    return f"the budget of {budget_minutes:g} device minutes is used up ({used_minutes:.2f})"
