"""Server-sent events from the database, replayed from any position; one poll for all streams tells which have news.

Between news a stream holds neither a thread nor a connection. All that one look finds is sent in one piece: FastAPI's
own event routes send every event by itself through two queues, at three times the processor time per event.
"""

import json
import logging
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from anyio import CapacityLimiter, to_thread
from fastapi import Request
from fastapi.sse import EventSourceResponse, format_sse_event
from sqlalchemy import Row
from sqlalchemy.exc import SQLAlchemyError

from experiments.outcomes import AblationState
from service.errors import ServiceError, Unavailable
from service.http.change_feed import ChangeFeed
from service.http.serializers import event_public
from service.http.shared_looks import SharedLooks
from service.lifecycle import OVER, EventKind
from service.schemas.events import Event
from service.store.ablations.ablations import check_exists
from service.store.ablations.changes import ALL, Mark, ablation_marks, last_event, log_marks, marks_of_all
from service.store.ablations.logs import read_log
from service.store.blocks.transitions import ending, events_after
from service.store.columns import rfc3339
from service.store.session import Store

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0
_EVENTS_AT_ONCE = 100
_LOG_BYTES_AT_ONCE = 131_072
"""What a stream holds for a reader that is slow is bounded by these."""
_THREADS = 4
_LOOKS_KEPT = 64
"""Batches, for streams that come to the same place a moment later."""
_RETRY_S = 5
_UNBUFFERED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@dataclass(frozen=True, kw_only=True)
class EventBatch:
    """What one look at the database found."""

    frames: bytes = b""
    position: Hashable
    """Where the next look begins."""
    is_last: bool = False
    is_all: bool = False
    """Whether nothing more was there, so that the next look can wait for the next mark."""


Look = Callable[[Any], EventBatch]
"""Looks from a position: of events that is a sequence number."""


class LogPosition(NamedTuple):
    """A place in a trial's log."""

    attempt: int | None
    """Whose log it is; None for that of the newest attempt, whichever it is."""
    offset: int

    @classmethod
    def of(cls, event_id: str) -> "LogPosition":
        """Return the place after the event that had this id."""
        attempt, _, offset = event_id.rpartition("-")
        return cls(int(attempt) if attempt else None, int(offset))

    def __str__(self) -> str:
        """Write it as an event's id."""
        return f"{self.attempt}-{self.offset}"


class Streams:
    """The open streams of this process: how many there may be, and what wakes them."""

    def __init__(self, store: Store, *, most: int, stopping: Callable[[], bool]) -> None:
        self._most = most
        self._open = 0
        self._stopping = stopping
        self._threads = CapacityLimiter(_THREADS)
        self._looks: SharedLooks[EventBatch] = SharedLooks(most=_LOOKS_KEPT)
        self._known: SharedLooks[None] = SharedLooks(most=_LOOKS_KEPT)
        self._store = store
        self._ablations = ChangeFeed(store, ablation_marks, stopping=stopping)
        self._logs = ChangeFeed(store, log_marks, stopping=stopping)
        self._all = ChangeFeed(store, marks_of_all, stopping=stopping)

    async def of_ablation(self, ablation_id: str, position: int) -> EventSourceResponse:
        """Follow an ablation's events after a sequence number.

        Raises NotFound, and Unavailable when too many streams are open.
        """
        check = partial(to_thread.run_sync, self._check_exists, ablation_id, limiter=self._threads)
        await self._known.get(ablation_id, check)  # once for hundreds that come at once: no ablation is ever deleted
        return self._answer(self._ablations, ablation_id, ablation_events(self._store, ablation_id), position)

    def of_log(self, trial_id: str, position: LogPosition) -> EventSourceResponse:
        """Follow a trial's log from a place in it. Raises Unavailable when too many streams are open."""
        return self._answer(self._logs, trial_id, log_events(self._store, trial_id), position)

    def of_all(self, position: int) -> EventSourceResponse:
        """Tell of changes anywhere after a sequence number. Raises Unavailable when too many streams are open."""
        return self._answer(self._all, ALL, changes(self._store), position)

    def _check_exists(self, ablation_id: str) -> None:
        with self._store.read() as connection:
            check_exists(connection, ablation_id)

    def _answer(self, feed: ChangeFeed, subject: str, look: Look, position: Hashable) -> EventSourceResponse:
        if self._open >= self._most:
            raise Unavailable(
                f"{self._most} streams are open and no more are allowed; ask again later, or ask for the list",
                headers={"Retry-After": str(_RETRY_S)},
            )
        return EventSourceResponse(self._frames(feed, subject, look, position), headers=_UNBUFFERED)

    async def _frames(self, feed: ChangeFeed, subject: str, look: Look, position: Hashable) -> AsyncIterator[bytes]:
        self._open += 1
        try:
            yield format_sse_event(comment="the stream begins")
            async for frames in self._news(feed, subject, look, position):
                yield frames
        except (SQLAlchemyError, ServiceError) as error:  # the reader connects again and asks from where it was
            log.warning("a stream ends early: %s", error)
        finally:
            self._open -= 1

    async def _news(self, feed: ChangeFeed, subject: str, look: Look, position: Hashable) -> AsyncIterator[bytes]:
        mark: Mark | None = None
        while not self._stopping():
            batch = await self._found(feed, subject, look, position, mark)
            position = batch.position
            if batch.frames:
                yield batch.frames
                if batch.is_last:
                    return
                if not batch.is_all:
                    continue
            seen, mark = mark, await feed.changed(subject, mark, patience_s=KEEP_ALIVE_S)
            while mark == seen and not self._stopping():
                yield format_sse_event(comment="keep-alive")
                mark = await feed.changed(subject, mark, patience_s=KEEP_ALIVE_S)

    async def _found(
        self, feed: ChangeFeed, subject: str, look: Look, position: Hashable, mark: Mark | None
    ) -> EventBatch:
        """Look from a position, once for all that stand there: it finds all that their mark tells of.

        Those that have heard of no mark yet share a look only while it is made, and are told of a mark afterwards.
        """
        here = partial(to_thread.run_sync, look, position, limiter=self._threads)
        return await self._looks.get((feed, subject, position, mark), here, is_settled=mark is not None)


def streams_of(request: Request) -> Streams:
    """Return the streams of this process."""
    streams: Streams = request.app.state.streams
    return streams


def ablation_events(store: Store, ablation_id: str) -> Look:
    """Return the look for an ablation's events after a sequence number; `end` once nothing more can come."""

    def look(after: int) -> EventBatch:
        with store.read() as connection:
            end = ending(connection, ablation_id)  # before the events: none comes after an ending
            rows = events_after(connection, ablation_id, after, limit=_EVENTS_AT_ONCE)
        is_over = end.state in OVER and (end.judged or end.state == AblationState.CANCELLED)
        if rows:
            frames = b"".join(_frame(event_public(row)) for row in rows)
            is_all = len(rows) < _EVENTS_AT_ONCE and not is_over
            return EventBatch(frames=frames, position=rows[-1].seq, is_all=is_all)
        if is_over:
            return EventBatch(frames=_frame(_end_event(ablation_id, after, end)), position=after, is_last=True)
        return EventBatch(position=after)

    return look


def _frame(event: Event) -> bytes:
    return format_sse_event(event=event.kind, id=str(event.seq), data_str=event.model_dump_json(by_alias=True))


def _end_event(ablation_id: str, seq: int, end: Row[Any]) -> Event:
    return Event(
        seq=seq,
        at=rfc3339(end.finished_at),
        kind=EventKind.END,
        subject=ablation_id,
        went_to=end.state,
        actor="service",
        reason=f"the ablation is {end.state}" + (" and has its verdict" if end.judged else ""),
        data={},
    )


def changes(store: Store) -> Look:
    """Return the look for whether anything has changed after a sequence number, not what."""

    def look(after: int) -> EventBatch:
        with store.read() as connection:
            newest = last_event(connection)
        if newest <= after:
            return EventBatch(position=after)
        frame = format_sse_event(event=EventKind.CHANGED, id=str(newest), data_str=json.dumps({"seq": newest}))
        return EventBatch(frames=frame, position=newest, is_all=True)

    return look


def log_events(store: Store, trial_id: str) -> Look:
    """Return the look for a trial's log from a place in it; an event's id is the place after it, `end` is the last.

    With the next attempt the log begins again, and so does what is sent.
    """

    def look(place: LogPosition) -> EventBatch:
        with store.read() as connection:
            page = read_log(connection, trial_id, offset=place.offset, attempt=place.attempt, most=_LOG_BYTES_AT_ONCE)
        after = LogPosition(page.attempt, page.end_offset)
        if page.data:
            told = {"attempt": page.attempt, "text": page.data.decode("utf-8", "replace")}
            return EventBatch(frames=_log_frame(EventKind.LOG, after, told), position=after)
        if page.complete:
            over = {"reason": "the trial is over"}
            return EventBatch(frames=_log_frame(EventKind.END, after, over), position=after, is_last=True)
        return EventBatch(position=after)

    return look


def _log_frame(kind: EventKind, after: LogPosition, data: Mapping[str, Any]) -> bytes:
    return format_sse_event(event=kind, id=str(after), data_str=json.dumps(data))
