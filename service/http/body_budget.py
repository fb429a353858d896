"""How many bytes of request bodies this process holds at once: many large bodies wait outside instead of in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from starlette.exceptions import HTTPException

_RETRY_S = 2


class BodyShare:
    """What one request holds of the budget."""

    def __init__(self, budget: "BodyBudget") -> None:
        self._budget = budget
        self.held = 0

    def take(self, count: int) -> None:
        """Take in `count` bytes more. Raises HTTPException (503) when the process holds too many already."""
        self._budget.add(count)
        self.held += count


class BodyBudget:
    """Counts the bytes of bodies from their arrival to the end of their requests."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._held = 0

    @contextmanager
    def share(self) -> Iterator[BodyShare]:
        """Give one request its share, and take all of it back in the end."""
        share = BodyShare(self)
        try:
            yield share
        finally:
            self._held -= share.held

    def add(self, count: int) -> None:
        """Count `count` bytes more. Raises HTTPException (503) instead of going over the budget."""
        if count and self._held + count > self._most:
            detail = f"bodies of {self._held} bytes are being read; allowed at once: {self._most}. Send it again later"
            raise HTTPException(
                HTTPStatus.SERVICE_UNAVAILABLE, detail, {"Retry-After": str(_RETRY_S), "Connection": "close"}
            )
        self._held += count
