"""Reading what happened, in order."""

from typing import Any

from sqlalchemy import Connection, Row, select

from service.store.tables import ablations, events


def after(connection: Connection, ablation_id: str, seq: int, *, limit: int = 500) -> list[Row[Any]]:
    """Return the events of an ablation with a sequence number above `seq`, oldest first."""
    query = select(events).where(events.c.ablation_id == ablation_id, events.c.seq > seq)
    return list(connection.execute(query.order_by(events.c.seq).limit(limit)))


def ending(connection: Connection, ablation_id: str) -> Row[Any]:
    """Return the ablation's state, and whether it has a verdict and a report."""
    query = select(ablations.c.state, ablations.c.verdict.is_not(None).label("judged"), ablations.c.finished_at)
    return connection.execute(query.where(ablations.c.id == ablation_id)).one()
