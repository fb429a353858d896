"""The rule of retries and budgets: what breaks a block, when it is run again, and when nothing more is started.

A service and a node without one follow the same rule, so an import keeps what an air-gapped run decided.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from experiments.outcomes import FailureClass

MAX_ATTEMPTS: dict[FailureClass, int] = {
    FailureClass.USER_ERROR: 1,
    FailureClass.OOM: 1,
    FailureClass.NUMERICS: 1,
    FailureClass.GATE_REFUSED: 1,
    FailureClass.INFRA_NODE: 5,
    FailureClass.INFRA_CONTROL: 5,
    FailureClass.PREEMPTED: 10,
    FailureClass.TIMEOUT: 2,
    FailureClass.CANCELLED: 1,
    FailureClass.INVALID_MEASUREMENT: 3,
    FailureClass.NO_RECEIPT: 3,
}
"""Attempts at one block that may end by this class before it is final. Every class counts alone."""

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

RETRY_CAP_S = 30.0


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
        for failure in FINAL_WHEN_REPEATED
        if _times(broken, Break(block_index, failure, arm), FINAL_WHEN_REPEATED[failure]) + 1 >= MAX_ATTEMPTS[failure]
    }
    return tuple(sorted(FINAL_WITH_RECEIPT | repeated))


def may_retry(broken: Sequence[Break], last: Break) -> bool:
    """Tell whether the block of `last`, which is the newest of `broken`, may run again."""
    return _times_in_block(broken, last) < MAX_ATTEMPTS[last.failure_class]


def attempt_words(broken: Sequence[Break], last: Break) -> str:
    """Say how often the block of `last` ended by its class, of how often it may, for example "timeout 1 of 2"."""
    return f"{last.failure_class} {_times_in_block(broken, last)} of {MAX_ATTEMPTS[last.failure_class]}"


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


def retry_wait_s(attempts: int) -> float:
    """Return how long a block rests after `attempts` broken attempts before a worker may claim it again.

    The first retry follows at once. A node without a service does not rest: nobody else waits for it.
    """
    return 0.0 if attempts == 1 else min(RETRY_CAP_S, 2.0 ** (attempts - 1))


def budget_spent(used_minutes: float, budget_minutes: float) -> str | None:
    """Return the sentence that says so once all attempts, broken ones included, have used the device minutes up."""
    if used_minutes < budget_minutes:
        return None
    return f"{used_minutes:.2f} of {budget_minutes:g} device minutes are used up"
