"""Waiting for a condition in tests, whose limit only ends a test that hangs; and calls at the same time."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
LIMIT_S = 240.0
"""The one limit of the suite: longer than a busy machine needs, shorter than pytest's, which names no reason."""
POLL_S = 5.0
"""Of one question to something that is asked again."""


def until(condition: Callable[[], Any], *, what: str = "it", pause_s: float = 0.02) -> Any:
    """Return what `condition` gives once it is true. Raises TimeoutError that says what did not happen."""
    deadline = time.monotonic() + LIMIT_S
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {LIMIT_S:.0f} s")
        time.sleep(pause_s)
    return result


def at_once(call: Callable[[int], T], count: int) -> list[T]:
    """Return the results of `call(0)` to `call(count - 1)`, each called in its own thread."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(call, range(count)))
