"""The stored events of ablations, for streams and pages."""

from typing import Any

from sqlalchemy import Connection, Row, func, select

from service.store.tables import ablations, events


def last_event(connection: Connection, ablation_id: str | None = None) -> int:
    """Return the sequence number of the last event of an ablation, or of all; 0 before the first."""
    query = select(func.max(events.c.seq))
    if ablation_id is not None:
        query = query.where(events.c.ablation_id == ablation_id)
    return int(connection.scalar(query) or 0)


def events_after(connection: Connection, ablation_id: str, seq: int, *, limit: int) -> list[Row[Any]]:
    """Return up to `limit` events of an ablation with a sequence number above `seq`, oldest first."""
    query = select(events).where(events.c.ablation_id == ablation_id, events.c.seq > seq)
    return list(connection.execute(query.order_by(events.c.seq).limit(limit)))


def ending(connection: Connection, ablation_id: str) -> Row[Any]:
    """Return the ablation's state, whether it has a verdict (`judged`), and when it ended (`finished_at`)."""
    query = select(ablations.c.state, ablations.c.verdict.is_not(None).label("judged"), ablations.c.finished_at)
    return connection.execute(query.where(ablations.c.id == ablation_id)).one()
