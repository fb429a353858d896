"""Facts: what the code that really ran says about itself, for gate attestation. Torch-free.

An operation records a fact at the place where the work happens (not where it was requested), so a gate that was
asked for and not live can be told from one that was. Recording outside `collect()` does nothing. One collector
serves the whole process, because a backward pass runs on threads that torch owns.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

Fact: TypeAlias = str | int | float | bool


class Facts(dict[str, Fact]):
    """The facts of one `collect()` block by name."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: dict[str, Mapping[str, Fact]] = {}
        """Generated kernels that ran, by name: registers, shared memory, instructions."""


_collectors: list[Facts] = []
"""Open `collect()` blocks, the innermost last; that one receives the facts."""


def collecting() -> bool:
    """Tell whether anybody listens, for facts that cost something to find out."""
    return bool(_collectors)


def record(name: str, value: Fact) -> None:
    """Set fact `name`; a second, different value under one name becomes 'mixed'."""
    if _collectors:
        facts = _collectors[-1]
        facts[name] = value if facts.get(name, value) == value else "mixed"


def add(name: str, amount: int) -> None:
    """Add `amount` to the counter `name`."""
    if _collectors:
        facts = _collectors[-1]
        facts[name] = int(facts.get(name, 0)) + amount


def describe(kernel: str, row: Mapping[str, Fact]) -> None:
    """Keep what is known about a generated kernel that ran."""
    if _collectors:
        _collectors[-1].kernels[kernel] = row


@contextmanager
def collect() -> Iterator[Facts]:
    """Collect what is recorded inside the block into the yielded dict."""
    facts = Facts()
    _collectors.append(facts)
    try:
        yield facts
    finally:
        _collectors.pop()
