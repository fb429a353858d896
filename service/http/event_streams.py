"""Server-sent events from the database, replayed from any position; each open stream polls for its own news.

Between two polls a stream holds neither a thread nor a connection. All events of one poll are sent in one piece.
"""

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from anyio import CapacityLimiter, to_thread
from fastapi import Request
from fastapi.sse import EventSourceResponse, format_sse_event
from sqlalchemy import Row
from sqlalchemy.exc import SQLAlchemyError

from ablate.experiments.outcomes import AblationState
from ablate.service.errors import ServiceError, TooManyRequests, Unavailable
from ablate.service.http.serializers import event_public
from ablate.service.lifecycle import OVER, EventKind
from ablate.service.principals import Principal
from ablate.service.schemas.ablations import Event
from ablate.service.store.ablations.ablations import check_exists, ending, events_after, last_event
from ablate.service.store.files.logs import read_log
from ablate.service.store.session import Store
from ablate.service.store.tables import rfc3339

log = logging.getLogger(__name__)

POLL_S = 0.5
"""Between two polls of a stream while few are open."""
STREAM_S = 0.004
"""Between two polls of a stream for each open stream, so that a thousand of them leave time for requests."""
KEEP_ALIVE_S = 15.0
_EVENTS_AT_ONCE = 100
_LOG_BYTES_AT_ONCE = 131_072
"""These two bound the memory of a stream whose reader is slow."""
_THREADS = 4
_RETRY_S = 5
_UNBUFFERED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@dataclass(frozen=True, kw_only=True)
class EventBatch:
    """The events that one poll returned."""

    frames: bytes = b""
    position: Hashable
    """Where the next poll begins."""
    is_last: bool = False


Poll = Callable[[Any], EventBatch]
"""Reads the events after a position, which for events is a sequence number."""


class LogPosition(NamedTuple):
    """A place in a trial's log."""

    attempt: int | None
    """The attempt whose log it is; None for the newest attempt."""
    offset: int

    @classmethod
    def of(cls, event_id: str) -> "LogPosition":
        """Return the place after the event with this id."""
        attempt, _, offset = event_id.rpartition("-")
        return cls(int(attempt) if attempt else None, int(offset))

    def __str__(self) -> str:
        """Format the place as an event's id."""
        return f"{self.attempt}-{self.offset}"


class Streams:
    """The open streams of this process, at most `most`, and at most `most_of_token` of one token."""

    def __init__(self, store: Store, *, most: int, most_of_token: int, stopping: Callable[[], bool]) -> None:
        self._store = store
        self._most = most
        self._most_of_token = most_of_token
        self._open_of: Counter[str] = Counter()
        """The open streams of each token, by its id."""
        self._stopping = stopping
        self._threads = CapacityLimiter(_THREADS)

    async def of_ablation(self, reader: Principal, ablation_id: str, position: int) -> EventSourceResponse:
        """Follow an ablation's events after a sequence number.

        Raises NotFound, and TooManyRequests or Unavailable when too many streams of the reader, or of all, are open.
        """
        await to_thread.run_sync(self._check_exists, ablation_id, limiter=self._threads)
        return self._answer(reader, ablation_events(self._store, ablation_id), position)

    def of_log(self, reader: Principal, trial_id: str, position: LogPosition) -> EventSourceResponse:
        """Follow a trial's log from a place in it. Raises TooManyRequests or Unavailable like `of_ablation`."""
        return self._answer(reader, log_events(self._store, trial_id), position)

    def of_all(self, reader: Principal, position: int) -> EventSourceResponse:
        """Report changes anywhere after a sequence number. Raises TooManyRequests or Unavailable like `of_ablation`."""
        return self._answer(reader, changes(self._store), position)

    def _check_exists(self, ablation_id: str) -> None:
        with self._store.read() as connection:
            check_exists(connection, ablation_id)

    def _answer(self, reader: Principal, poll: Poll, position: Hashable) -> EventSourceResponse:
        later = {"Retry-After": str(_RETRY_S)}
        if self._open_of[reader.token_id] >= self._most_of_token:
            raise TooManyRequests(
                f"this token has {self._most_of_token} open streams and no more are allowed; close one", headers=later
            )
        if self._open_of.total() >= self._most:
            raise Unavailable(
                f"{self._most} streams are open and no more are allowed; ask again later, or ask for the list",
                headers=later,
            )
        return EventSourceResponse(self._frames(reader.token_id, poll, position), headers=_UNBUFFERED)

    async def _frames(self, token_id: str, poll: Poll, position: Hashable) -> AsyncIterator[bytes]:
        self._open_of[token_id] += 1
        try:
            yield format_sse_event(comment="the stream begins")
            async for frames in self._news(poll, position):
                yield frames
        except (SQLAlchemyError, ServiceError) as error:  # the reader reconnects with its last position
            log.warning("a stream ends early: %s", error)
        finally:
            self._open_of.subtract([token_id])
            self._open_of += Counter()  # forgets tokens without a stream

    async def _news(self, poll: Poll, position: Hashable) -> AsyncIterator[bytes]:
        sent_at = time.monotonic()
        while not self._stopping():
            batch = await to_thread.run_sync(poll, position, limiter=self._threads)
            position = batch.position
            if batch.frames:
                yield batch.frames
                sent_at = time.monotonic()
                if batch.is_last:
                    return
                continue
            if time.monotonic() - sent_at >= KEEP_ALIVE_S:
                yield format_sse_event(comment="keep-alive")
                sent_at = time.monotonic()
            await asyncio.sleep(max(POLL_S, STREAM_S * self._open_of.total()))


def streams_of(request: Request) -> Streams:
    """Return the streams of this process."""
    streams: Streams = request.app.state.streams
    return streams


def ablation_events(store: Store, ablation_id: str) -> Poll:
    """Return the poll for an ablation's events after a sequence number; `end` once nothing more can come."""

    def poll(after: int) -> EventBatch:
        with store.read() as connection:
            end = ending(connection, ablation_id)  # before the events: none comes after an ending
            rows = events_after(connection, ablation_id, after, limit=_EVENTS_AT_ONCE)
        if rows:
            return EventBatch(frames=b"".join(_frame(event_public(row)) for row in rows), position=rows[-1].seq)
        if end.state in OVER and (end.judged or end.state == AblationState.CANCELLED):
            return EventBatch(frames=_frame(_end_event(ablation_id, after, end)), position=after, is_last=True)
        return EventBatch(position=after)

    return poll


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


def changes(store: Store) -> Poll:
    """Return the poll that reports whether anything has changed after a sequence number, without details."""

    def poll(after: int) -> EventBatch:
        with store.read() as connection:
            newest = last_event(connection)
        if newest <= after:
            return EventBatch(position=after)
        frame = format_sse_event(event=EventKind.CHANGED, id=str(newest), data_str=json.dumps({"seq": newest}))
        return EventBatch(frames=frame, position=newest)

    return poll


def log_events(store: Store, trial_id: str) -> Poll:
    """Return the poll for a trial's log from a place in it; an event's id is the place after it, `end` is the last.

    With the next attempt the log begins again, and so does the stream.
    """

    def poll(place: LogPosition) -> EventBatch:
        with store.read() as connection:
            page = read_log(connection, trial_id, offset=place.offset, attempt=place.attempt, most=_LOG_BYTES_AT_ONCE)
        after = LogPosition(page.attempt, page.end_offset)
        if page.data:
            piece = {"attempt": page.attempt, "text": page.data.decode("utf-8", "replace")}
            return EventBatch(frames=_log_frame(EventKind.LOG, after, piece), position=after)
        if page.complete:
            over = {"reason": "the trial is over"}
            return EventBatch(frames=_log_frame(EventKind.END, after, over), position=after, is_last=True)
        return EventBatch(position=after)

    return poll


def _log_frame(kind: EventKind, after: LogPosition, data: Mapping[str, Any]) -> bytes:
    return format_sse_event(event=kind, id=str(after), data_str=json.dumps(data))
