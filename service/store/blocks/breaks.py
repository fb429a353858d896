"""Attempts that left no receipts which count: what the rule of retries and a verdict know of them."""

from typing import Any

from sqlalchemy import Connection, Select, bindparam, select

from experiments.outcomes import AttemptState, FailureClass
from experiments.records.circumstances import AttemptRecord
from experiments.retries import Break
from service.store.tables import attempts, blocks, nodes

_INDEX = blocks.c["index"].label("block_index")
_BROKEN = (AttemptState.BROKEN, AttemptState.RELEASED, AttemptState.EXPIRED)


def _broken(*columns: Any) -> Select[Any]:
    query = select(*columns).select_from(attempts).join(blocks, blocks.c.id == attempts.c.block_id)
    query = query.where(attempts.c.ablation_id == bindparam("ablation"), attempts.c.state.in_(_BROKEN))
    return query.order_by(attempts.c.started_at, attempts.c.id)


_BREAKS = _broken(_INDEX, attempts.c.failure_class, attempts.c.arm)


def breaks_of(connection: Connection, ablation_id: str) -> tuple[Break, ...]:
    """Return every attempt of the ablation that broke, oldest first, for the rule of retries."""
    rows = connection.execute(_BREAKS, {"ablation": ablation_id})
    return tuple(Break(row.block_index, FailureClass(row.failure_class), row.arm) for row in rows)


def broken_attempts(connection: Connection, ablation_id: str) -> tuple[AttemptRecord, ...]:
    """Return every attempt of the ablation that broke, by block and number, for its verdict."""
    columns = (_INDEX, attempts.c.number, attempts.c.failure_class, attempts.c.arm, attempts.c.message)
    query = _broken(*columns, nodes.c.name).join(nodes, nodes.c.id == attempts.c.node_id)
    ordered = query.order_by(None).order_by(blocks.c["index"], attempts.c.number)
    return tuple(
        AttemptRecord(
            block_index=row.block_index,
            number=row.number,
            failure_class=FailureClass(row.failure_class),
            arm=row.arm,
            message=row.message,
            node=row.name,
        )
        for row in connection.execute(ordered, {"ablation": ablation_id})
    )
