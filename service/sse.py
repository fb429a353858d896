"""Server-sent events from the database: polled by position, replayed from any position.

Between polls a stream holds neither a thread nor a connection. All that one poll finds is sent in one piece: FastAPI's
own event routes send every event by itself through two queues, at three times the processor time per event.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from anyio import to_thread
from fastapi import Request
from fastapi.sse import EventSourceResponse, format_sse_event
from sqlalchemy import Row

from experiments.outcomes import AblationState
from service.lifecycle import OVER, EventKind
from service.schemas.events import Event
from service.serializers import event_public
from service.store.columns import rfc3339
from service.store.logs import read_log
from service.store.session import Store
from service.store.transitions import ending, events_after

POLL_S = 0.25
KEEP_ALIVE_S = 15.0
_UNBUFFERED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@dataclass(frozen=True, kw_only=True)
class EventBatch:
    """What one look at the database found."""

    frames: bytes = b""
    position: int
    """Where the next look begins."""
    is_last: bool = False


def event_stream(request: Request, look: Callable[[int], EventBatch], position: int) -> EventSourceResponse:
    """Answer with what `look` finds from `position` on, until its last batch or the end of this process."""
    return EventSourceResponse(_frames(request, look, position), headers=_UNBUFFERED)


async def _frames(request: Request, look: Callable[[int], EventBatch], position: int) -> AsyncIterator[bytes]:
    yield format_sse_event(comment="the stream begins")
    spoken = time.monotonic()
    while not request.app.state.stopping:
        batch = await to_thread.run_sync(look, position)
        if batch.frames:
            position, spoken = batch.position, time.monotonic()
            yield batch.frames
            if batch.is_last:
                return
            continue
        if time.monotonic() - spoken > KEEP_ALIVE_S:
            spoken = time.monotonic()
            yield format_sse_event(comment="keep-alive")
        await asyncio.sleep(POLL_S)


def ablation_events(store: Store, ablation_id: str) -> Callable[[int], EventBatch]:
    """Return the look for an ablation's events after a sequence number; `end` once nothing more can come."""

    def look(after: int) -> EventBatch:
        with store.read() as connection:
            end = ending(connection, ablation_id)  # before the events: none comes after an ending
            rows = events_after(connection, ablation_id, after)
        if rows:
            return EventBatch(frames=b"".join(_frame(event_public(row)) for row in rows), position=rows[-1].seq)
        if end.state in OVER and (end.judged or end.state == AblationState.CANCELLED):
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


def log_events(store: Store, trial_id: str) -> Callable[[int], EventBatch]:
    """Return the look for a trial's log from a byte offset; an event's id is the offset after it, `end` is the last."""

    def look(offset: int) -> EventBatch:
        with store.read() as connection:
            page = read_log(connection, trial_id, offset=offset)
        if page.data:
            text = json.dumps({"text": page.data.decode("utf-8", "replace")})
            return EventBatch(frames=_log_frame(EventKind.LOG, page.end_offset, text), position=page.end_offset)
        if page.complete:
            reason = json.dumps({"reason": "the trial is over"})
            return EventBatch(frames=_log_frame(EventKind.END, offset, reason), position=offset, is_last=True)
        return EventBatch(position=offset)

    return look


def _log_frame(kind: EventKind, offset: int, data: str) -> bytes:
    return format_sse_event(event=kind, id=str(offset), data_str=data)
