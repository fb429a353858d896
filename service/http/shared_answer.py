"""One answer for all who ask at the same time, kept for a moment: strangers cost the same in any number."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

_Answer = TypeVar("_Answer")


class SharedAnswer(Generic[_Answer]):
    """Makes an answer when somebody asks, never twice at once; used from the event loop's thread only."""

    def __init__(self, make: Callable[[], Awaitable[_Answer]], *, fresh_s: float) -> None:
        self._make = make
        self._fresh_s = fresh_s
        self._made_at = 0.0
        self._task: asyncio.Future[_Answer] | None = None

    async def get(self) -> _Answer:
        """Return the answer, at most `fresh_s` old; all who wait for one hear the same, an error too."""
        task = self._task
        if task is None or (task.done() and self._is_stale(task)):
            task = self._task = asyncio.ensure_future(self._timed())
        if task.done():
            return task.result()
        return await asyncio.shield(task)  # who goes away does not end it for the others

    def _is_stale(self, task: "asyncio.Future[_Answer]") -> bool:
        failed = task.cancelled() or task.exception() is not None
        return failed or time.monotonic() - self._made_at > self._fresh_s

    async def _timed(self) -> _Answer:
        answer = await self._make()
        self._made_at = time.monotonic()
        return answer
