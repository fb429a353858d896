"""Facts: what the code that really ran says about itself, for gate attestation. Torch-free.

An operation records a fact at the place where the work happens (not where it was requested), so a gate that was
asked for and not live can be told from one that was. Recording outside `collect()` does nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

Fact: TypeAlias = str | int | float | bool

_facts: ContextVar[dict[str, Fact] | None] = ContextVar("facts", default=None)


def record(name: str, value: Fact) -> None:
    """Set fact `name`; a second, different value under one name becomes 'mixed'."""
    facts = _facts.get()
    if facts is not None:
        facts[name] = value if facts.get(name, value) == value else "mixed"


def add(name: str, amount: int) -> None:
    """Add `amount` to the counter `name`."""
    facts = _facts.get()
    if facts is not None:
        facts[name] = int(facts.get(name, 0)) + amount


@contextmanager
def collect() -> Iterator[dict[str, Fact]]:
    """Collect the facts recorded inside the block into the yielded dict."""
    facts: dict[str, Fact] = {}
    token = _facts.set(facts)
    try:
        yield facts
    finally:
        _facts.reset(token)
