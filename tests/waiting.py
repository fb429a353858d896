"""Waiting for a condition in tests, whose limit only ends a test that hangs; and calls at the same time."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def until(condition: Callable[[], Any], patience_s: float = 120.0, *, what: str = "it") -> Any:
    """Return what `condition` gives once it is true. Raises TimeoutError that says what did not happen."""
    deadline = time.monotonic() + patience_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {patience_s:.0f} s")
        time.sleep(0.02)
    return found


def at_once(call: Callable[[int], T], count: int) -> list[T]:
    """Return the results of `call(0)` to `call(count - 1)`, each called in its own thread."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(call, range(count)))
