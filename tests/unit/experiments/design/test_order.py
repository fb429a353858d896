from collections import Counter
from itertools import pairwise

import pytest

from experiments.design.plan import orders

ARMS = {number: [f"arm{index}" for index in range(number)] for number in range(2, 10)}


@pytest.mark.parametrize("number", range(2, 10))
@pytest.mark.parametrize("blocks", [6, 7, 13, 20])
def test_orders_differ_by_at_most_one_in_every_position(number: int, blocks: int) -> None:
    rows = orders(ARMS[number], blocks=blocks, seed=3)
    assert all(sorted(row) == ARMS[number] for row in rows)
    for position in range(number):
        counts = Counter(row[position] for row in rows)
        assert max(counts.values()) - min(counts[arm] for arm in ARMS[number]) <= 1


@pytest.mark.parametrize("number", range(2, 10))
def test_orders_balance_who_follows_whom_over_full_squares(number: int) -> None:
    rows = orders(ARMS[number], blocks=number if number % 2 == 0 else 2 * number, seed=11)
    follows = Counter(pair for row in rows for pair in pairwise(row))
    assert len(follows) == number * (number - 1)
    assert len(set(follows.values())) == 1


def test_orders_are_random_in_the_seed_and_the_same_for_one_seed() -> None:
    first = orders(ARMS[3], blocks=6, seed=1)
    assert first == orders(ARMS[3], blocks=6, seed=1)
    assert len({tuple(orders(ARMS[3], blocks=6, seed=seed)) for seed in range(30)}) > 20


def test_orders_are_the_same_on_every_machine() -> None:
    assert orders(["a", "b"], blocks=4, seed=20261120) == [("b", "a"), ("a", "b"), ("a", "b"), ("b", "a")]


def test_orders_put_each_arm_first_about_equally_often_over_seeds() -> None:
    firsts = Counter(orders(ARMS[4], blocks=1, seed=seed)[0][0] for seed in range(800))
    assert all(150 <= firsts[arm] <= 250 for arm in ARMS[4])
