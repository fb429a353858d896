from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate.experiments.outcomes import FailureClass
from ablate.experiments.retries import (
    Break,
    attempt_words,
    budget_spent,
    final_failures,
    may_retry,
    retry_wait_s,
)

ARMS = ("baseline", "a", "b")
RESULTS = {failure for failure in FailureClass if failure.rule.is_result}
REPEATED = {failure for failure in FailureClass if failure.rule.final_when}
BREAKS = st.lists(
    st.builds(Break, st.integers(0, 2), st.sampled_from(FailureClass), st.sampled_from([None, *ARMS])), max_size=40
)


def again(failure: FailureClass, times: int) -> bool:
    """Tell whether a block may run again after `failure` ended it so often."""
    broken = [Break(0, failure, "a")] * times
    return may_retry(broken, broken[-1])


@pytest.mark.parametrize("failure", FailureClass)
def test_every_failure_class_allows_a_number_of_attempts(failure: FailureClass) -> None:
    answers = [again(failure, times) for times in range(1, 13)]
    assert answers == sorted(answers, reverse=True)
    assert answers.count(True) == failure.rule.attempts - 1
    assert not answers[-1]


def test_what_is_a_result_of_the_arm_is_not_run_again() -> None:
    assert [failure for failure in FailureClass if failure.rule.is_result and again(failure, 1)] == []


def test_trouble_of_the_machine_is_run_again_and_a_wish_of_a_person_is_not() -> None:
    assert {failure for failure in FailureClass if again(failure, 1)} == {
        FailureClass.INFRA_NODE,
        FailureClass.INFRA_CONTROL,
        FailureClass.PREEMPTED,
        FailureClass.TIMEOUT,
        FailureClass.INVALID_MEASUREMENT,
        FailureClass.DISTURBED,
        FailureClass.NO_RECEIPT,
    }


def test_classes_count_alone() -> None:
    broken = [Break(0, FailureClass.PREEMPTED, None)] * 3 + [Break(0, FailureClass.TIMEOUT, "a")]
    assert may_retry(broken, broken[-1])
    assert attempt_words(broken, broken[-1]) == "timeout 1 of 2"


@given(BREAKS, st.integers(0, 2), st.sampled_from(ARMS))
def test_final_failures_are_those_that_were_said_often_enough(broken: list[Break], block: int, arm: str) -> None:
    final = final_failures(broken, block, arm)
    by_arm = Counter((one.failure_class, one.arm) for one in broken)
    by_block = Counter((one.failure_class, one.block_index) for one in broken)
    by_both = Counter(broken)
    assert set(final) >= RESULTS
    assert (FailureClass.TIMEOUT in final) is (by_arm[FailureClass.TIMEOUT, arm] >= 1)
    assert (FailureClass.NO_RECEIPT in final) is (by_arm[FailureClass.NO_RECEIPT, arm] >= 2)
    assert (FailureClass.INVALID_MEASUREMENT in final) is (by_block[FailureClass.INVALID_MEASUREMENT, block] >= 2)
    assert (FailureClass.DISTURBED in final) is (by_block[FailureClass.DISTURBED, block] >= 1)
    assert (FailureClass.INFRA_NODE in final) is (by_both[Break(block, FailureClass.INFRA_NODE, arm)] >= 4)
    assert set(final) <= RESULTS | REPEATED


@given(st.data())
def test_no_arm_starves_a_block(data: st.DataObject) -> None:
    """Whatever arms do, of classes that can become their result: no block fails, and each is run a bounded number of
    times.
    """
    broken: list[Break] = []
    classes = sorted(REPEATED - {FailureClass.INFRA_NODE})
    for block in range(3):
        attempts = 0
        while True:
            attempts += 1
            ended = data.draw(st.sampled_from([None, *((failure, arm) for failure in classes for arm in ARMS)]))
            if ended is None or ended[0] in final_failures(broken, block, ended[1]):
                break
            broken.append(Break(block, *ended))
            assert may_retry(broken, broken[-1])
        assert attempts <= 1 + len(ARMS) * (1 + 2) + 2


def test_one_arm_that_loses_its_device_every_time_does_not_fail_the_block() -> None:
    broken: list[Break] = []
    while FailureClass.INFRA_NODE not in final_failures(broken, 0, "a"):
        broken.append(Break(0, FailureClass.INFRA_NODE, "a"))
        assert may_retry(broken, broken[-1])
    assert len(broken) == FailureClass.INFRA_NODE.rule.attempts - 1
    assert FailureClass.INFRA_NODE not in final_failures(broken, 0, "b")
    broken.append(Break(0, FailureClass.INFRA_NODE, "b"))
    assert not may_retry(broken, broken[-1])


def test_rests_grow_with_the_breaks_of_the_same_class_in_the_same_block_alone() -> None:
    others = [Break(0, FailureClass.PREEMPTED, None)] * 7 + [Break(1, FailureClass.INFRA_NODE, "a")] * 3
    waits = []
    for times in range(1, 7):
        broken = others + [Break(0, FailureClass.INFRA_NODE, "a")] * times
        waits.append(retry_wait_s(broken, broken[-1]))
    assert waits == [0.0, 2.0, 4.0, 8.0, 16.0, 16.0]
    assert retry_wait_s(others, others[0]) == 0.0


@pytest.mark.parametrize(("used", "budget", "is_spent"), [(0.0, 1.0, False), (0.999, 1.0, False), (1.0, 1.0, True)])
def test_budget_is_spent_when_the_last_minute_is(used: float, budget: float, is_spent: bool) -> None:
    assert (budget_spent(used, budget) is not None) is is_spent
