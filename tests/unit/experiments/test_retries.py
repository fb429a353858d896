import pytest

from experiments.outcomes import FailureClass
from experiments.retries import FINAL_WITH_RECEIPT, MAX_ATTEMPTS, attempt_words, budget_spent, may_retry, retry_wait_s


@pytest.mark.parametrize("failure", FailureClass)
def test_every_failure_class_allows_a_number_of_attempts(failure: FailureClass) -> None:
    answers = [may_retry(attempts, failure) for attempts in range(1, 13)]
    assert answers == sorted(answers, reverse=True)
    assert answers.count(True) == MAX_ATTEMPTS[failure] - 1
    assert not answers[-1]


def test_what_is_a_result_of_the_arm_is_not_run_again() -> None:
    assert [failure for failure in FINAL_WITH_RECEIPT if may_retry(1, failure)] == []


def test_trouble_of_the_machine_is_run_again_and_a_wish_of_a_person_is_not() -> None:
    again = {failure for failure in FailureClass if may_retry(1, failure)}
    assert again == {
        FailureClass.INFRA_NODE,
        FailureClass.INFRA_CONTROL,
        FailureClass.PREEMPTED,
        FailureClass.TIMEOUT,
        FailureClass.INVALID_MEASUREMENT,
        FailureClass.NO_RECEIPT,
    }


def test_first_retry_follows_at_once_and_later_ones_rest_longer() -> None:
    assert [retry_wait_s(attempts) for attempts in range(1, 8)] == [0.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


@pytest.mark.parametrize(("used", "budget", "is_spent"), [(0.0, 1.0, False), (0.999, 1.0, False), (1.0, 1.0, True)])
def test_budget_is_spent_when_the_last_minute_is(used: float, budget: float, is_spent: bool) -> None:
    assert (budget_spent(used, budget) is not None) is is_spent


def test_attempt_is_said_with_how_many_there_may_be() -> None:
    assert attempt_words(1, FailureClass.TIMEOUT) == "attempt 1 of 2"


def test_budget_says_what_was_used_and_what_was_allowed() -> None:
    assert budget_spent(2.0, 0.5) == "2.00 of 0.5 device minutes are used up"
