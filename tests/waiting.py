"""Waiting for a condition in tests, whose limit only ends a test that hangs."""

import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any], patience_s: float = 120.0, *, what: str = "it") -> Any:
    """Return what `condition` gives once it is true. Raises TimeoutError that says what did not happen."""
    deadline = time.monotonic() + patience_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {patience_s:.0f} s")
        time.sleep(0.02)
    return found
