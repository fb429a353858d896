"""Running orders: balanced for position and carry-over, random, and the same on every machine for one seed.

Blocks are filled from Williams squares. In one square (two mirrored squares for an odd number of arms) every arm
takes every position equally often and follows every other arm equally often. Rows come in groups of one Latin square
each, so after any number of blocks no arm is ahead of another in any position by more than one.
"""

import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def orders(arms: Sequence[str], *, blocks: int, seed: int) -> list[tuple[str, ...]]:
    """Return the running order of each block, every arm exactly once in each."""
    rows = _endless(len(arms), random.Random(seed))  # noqa: S311  # reproducible by design, nothing secret
    return [tuple(arms[index] for index in next(rows)) for _ in range(blocks)]


def _endless(number: int, rng: random.Random) -> Iterator[list[int]]:
    while True:
        labels = _shuffled(range(number), rng)
        for square in _shuffled(_williams(number), rng):
            for row in _shuffled(square, rng):
                yield [labels[index] for index in row]


def _williams(number: int) -> list[list[list[int]]]:
    """Return one square (even `number`) or a mirrored pair (odd) as lists of rows."""
    first = [(step + 1) // 2 if step % 2 else -(step // 2) for step in range(number)]
    square = [[(start + offset) % number for offset in first] for start in range(number)]
    return [square] if number % 2 == 0 else [square, [row[::-1] for row in square]]


def _shuffled(items: Sequence[Item], rng: random.Random) -> list[Item]:
    """Fisher-Yates on rng.random() alone, the one method whose sequence Python promises to keep."""
    result = list(items)
    for last in range(len(result) - 1, 0, -1):
        chosen = int(rng.random() * (last + 1))
        result[last], result[chosen] = result[chosen], result[last]
    return result
