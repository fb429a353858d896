"""Facts that running code records about itself, for the attestation of gates. Torch-free.

An operation records a fact where it does the work, not where the work is requested. So the facts show whether a
requested gate was live. Outside `collect()` recording does nothing. One collector serves the whole process, because
torch runs backward passes on its own threads.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

Fact: TypeAlias = str | int | float | bool

RECURRENCE = "recurrence.walk"
"""Fact that the loop in model/layers/recurrence.py and the kernel in kernels/recurrence.py record."""


class Facts(dict[str, Fact]):
    """The facts of one `collect()` block by name."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: dict[str, Mapping[str, Fact]] = {}
        """Generated kernels that ran, by name: registers, shared memory, instructions."""


_collectors: list[Facts] = []
"""Open `collect()` blocks; the last, innermost one receives the facts."""


def collecting() -> bool:
    """Return whether a `collect()` block is open. Expensive facts are computed only then."""
    return bool(_collectors)


def record(name: str, value: Fact) -> None:
    """Set fact `name`. Two different values under one name become 'mixed'."""
    if _collectors:
        facts = _collectors[-1]
        facts[name] = value if facts.get(name, value) == value else "mixed"


def add(name: str, amount: int) -> None:
    """Add `amount` to the counter `name`."""
    if _collectors:
        facts = _collectors[-1]
        facts[name] = int(facts.get(name, 0)) + amount


def describe(kernel: str, row: Mapping[str, Fact]) -> None:
    """Store the attested row of a generated kernel that ran."""
    if _collectors:
        _collectors[-1].kernels[kernel] = row


@contextmanager
def collect() -> Iterator[Facts]:
    """Yield a dict that collects the facts recorded inside the block."""
    facts = Facts()
    _collectors.append(facts)
    try:
        yield facts
    finally:
        _collectors.pop()
