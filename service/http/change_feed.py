"""One question to the database for all open streams: which of their subjects have something new.

Hundreds of streams that each asked by themselves would hold every thread that requests need.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anyio import CapacityLimiter, to_thread
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from service.store.ablations.changes import Mark
from service.store.session import Store

log = logging.getLogger(__name__)

POLL_S = 0.25
"""Between two polls while few wait."""
STREAM_S = 0.002
"""Between two polls for each stream that waits, so that telling hundreds of them leaves time for requests."""
_BAD_POLL_S = 2.0
"""After a poll that failed."""

ReadMarks = Callable[[Connection, Sequence[str]], dict[str, Mark]]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Waiter:
    seen: Mark | None
    told: "asyncio.Future[Mark | None]"


class ChangeFeed:
    """Wakes each stream when its subject has a new mark; asks nothing while nobody waits."""

    def __init__(self, store: Store, read: ReadMarks, *, stopping: Callable[[], bool]) -> None:
        self._store = store
        self._read = read
        self._stopping = stopping
        self._waiting: dict[str, set[_Waiter]] = {}
        self._thread = CapacityLimiter(1)
        self._task: asyncio.Task[None] | None = None

    async def changed(self, subject: str, seen: Mark | None, *, patience_s: float) -> Mark | None:
        """Return the subject's mark as soon as it is not `seen`; `seen` after `patience_s`, or at the process's end."""
        waiter = _Waiter(seen=seen, told=asyncio.get_running_loop().create_future())
        self._waiting.setdefault(subject, set()).add(waiter)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll())
        try:
            return await asyncio.wait_for(waiter.told, patience_s)
        except TimeoutError:
            return seen
        finally:
            own = self._waiting[subject]
            own.discard(waiter)
            if not own:
                del self._waiting[subject]

    async def _poll(self) -> None:
        failed = False
        while self._waiting:
            await asyncio.sleep(_BAD_POLL_S if failed else self._pause_s())
            subjects = list(self._waiting)
            try:
                marks = await to_thread.run_sync(self._marks, subjects, limiter=self._thread)
                failed = False
            except SQLAlchemyError as error:
                log.warning("streams hear nothing until the database answers again: %s", error)
                marks, failed = {}, True
            self._tell(subjects, marks)

    def _pause_s(self) -> float:
        return max(POLL_S, STREAM_S * sum(map(len, self._waiting.values())))

    def _marks(self, subjects: Sequence[str]) -> dict[str, Mark]:
        with self._store.read() as connection:
            return self._read(connection, subjects)

    def _tell(self, subjects: Sequence[str], marks: dict[str, Mark]) -> None:
        for subject in subjects:
            for waiter in self._waiting.get(subject, ()):
                mark = marks.get(subject, waiter.seen)
                if not waiter.told.done() and (mark != waiter.seen or self._stopping()):
                    waiter.told.set_result(mark)
