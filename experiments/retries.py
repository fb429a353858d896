"""The rule of retries and budgets: what breaks a block, when it is run again, and when nothing more is started.

A service and a node without one follow the same rule, so an import keeps what an air-gapped run decided.
"""

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
"""Attempts at one block, in all, before a failure of this class is final."""

FINAL_WITH_RECEIPT = frozenset(
    {FailureClass.OOM, FailureClass.NUMERICS, FailureClass.GATE_REFUSED, FailureClass.USER_ERROR}
)
"""Classes that are a result of the arm, not of the node: the block counts, with a receipt that says so."""

RETRY_CAP_S = 30.0


def may_retry(attempts: int, last_failure: FailureClass) -> bool:
    """Tell whether a block may run again after `attempts` broken attempts, the last of them by `last_failure`."""
    return attempts < MAX_ATTEMPTS[last_failure]


def attempt_words(attempt_no: int, failure: FailureClass) -> str:
    """Say which attempt `failure` ended, of how many that it allows, for example "attempt 1 of 2"."""
    return f"attempt {attempt_no} of {MAX_ATTEMPTS[failure]}"


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
