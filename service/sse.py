"""Server-sent events from the database: polled by sequence number, replayed from any of them.

Between polls a stream holds neither a thread nor a connection.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from anyio import to_thread
from fastapi.responses import StreamingResponse
from sqlalchemy import Row

from service.lifecycle import OVER, AblationState
from service.store import events
from service.store.columns import rfc3339
from service.store.logs import LogPage, read_log
from service.store.session import Store

POLL_S = 0.25
KEEP_ALIVE_S = 15.0


def frame(name: str, identifier: int, data: str) -> str:
    """Write one event."""
    lines = "".join(f"data: {line}\n" for line in data.split("\n"))
    return f"id: {identifier}\nevent: {name}\n{lines}\n"


def stream(frames: AsyncIterator[str]) -> StreamingResponse:
    """Answer with a stream that no proxy buffers."""
    return StreamingResponse(
        frames, media_type="text/event-stream", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    )


async def ablation_frames(
    store: Store, ablation_id: str, after: int, *, stopping: Callable[[], bool]
) -> AsyncIterator[str]:
    """Yield the ablation's events after `after` as they come, then `end` once nothing more can come."""

    def poll(seq: int) -> tuple[list[Row[Any]], Row[Any]]:
        with store.read() as connection:
            ending = events.ending(connection, ablation_id)
            return events.after(connection, ablation_id, seq), ending

    spoken = time.monotonic()
    yield ": stream of events\n\n"
    while not stopping():
        rows, ending = await to_thread.run_sync(poll, after)
        for row in rows:
            after = row.seq
            yield frame(row.kind, row.seq, _event_json(row))
        if not rows and ending.state in OVER and (ending.judged or ending.state == AblationState.CANCELLED):
            yield frame("end", after, _end_json(ablation_id, after, ending))
            return
        if rows:
            spoken = time.monotonic()
            continue
        if time.monotonic() - spoken > KEEP_ALIVE_S:
            spoken = time.monotonic()
            yield ": keep-alive\n\n"
        await asyncio.sleep(POLL_S)


def _event_json(row: Row[Any]) -> str:
    document = {
        "seq": row.seq,
        "at": rfc3339(row.at),
        "kind": row.kind,
        "subject": row.subject,
        "from": row.old,
        "to": row.new,
        "actor": row.actor,
        "reason": row.reason,
        "data": json.loads(row.data),
    }
    return json.dumps(document)


def _end_json(ablation_id: str, seq: int, ending: Row[Any]) -> str:
    reason = f"the ablation is {ending.state}" + (" and has its verdict" if ending.judged else "")
    document = {
        "seq": seq,
        "at": rfc3339(ending.finished_at),
        "kind": "end",
        "subject": ablation_id,
        "from": None,
        "to": ending.state,
        "actor": "service",
        "reason": reason,
        "data": {},
    }
    return json.dumps(document)


async def log_frames(store: Store, trial_id: str, offset: int, *, stopping: Callable[[], bool]) -> AsyncIterator[str]:
    """Yield the trial's log from `offset` as it grows; an event's id is the offset after it; `end` is the last."""

    def poll(start: int) -> LogPage:
        with store.read() as connection:
            return read_log(connection, trial_id, offset=start)

    spoken = time.monotonic()
    yield ": stream of log text\n\n"
    while not stopping():
        page = await to_thread.run_sync(poll, offset)
        if page.data:
            offset, spoken = page.end_offset, time.monotonic()
            yield frame("log", offset, json.dumps({"text": page.data.decode("utf-8", "replace")}))
            continue
        if page.complete:
            yield frame("end", offset, json.dumps({"reason": "the trial is over"}))
            return
        if time.monotonic() - spoken > KEEP_ALIVE_S:
            spoken = time.monotonic()
            yield ": keep-alive\n\n"
        await asyncio.sleep(POLL_S)
