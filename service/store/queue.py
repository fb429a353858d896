"""What stands between waiting ablations and a node: their places in the queue, the nodes, and the pace of late.

Every function answers for many ablations in one query.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, func, or_, select, union_all

from experiments.outcomes import AblationState, BlockState
from service.store.columns import db_now
from service.store.placement import Needs
from service.store.tables import ablations, blocks, nodes
from service.store.turns import ORDER

_PACE_OF = 20
"""Newest finished ablations whose blocks tell the pace."""


@dataclass(frozen=True, kw_only=True)
class QueuePlace:
    """Where the first block of an ablation stands in the queue of its node class."""

    blocks_ahead: int
    rest_s: float
    """Until one of its blocks may be claimed: a pause after an attempt that broke; 0 or less for none."""


def places(connection: Connection, ablation_ids: Collection[str]) -> dict[str, QueuePlace]:
    """Return the place of every ablation among these that has a queued block.

    Only the part of the queue is numbered that may stand before their first blocks. Ablations take turns, so that is
    about one block of each that waits, and not all of theirs.
    """
    waiting = connection.execute(_waiting(ablation_ids)).all()
    if not waiting:
        return {}
    ahead = func.row_number().over(partition_by=blocks.c.node_class, order_by=ORDER) - 1
    part = select(blocks.c.ablation_id, ahead.label("ahead")).where(_QUEUED, or_(*_not_behind(waiting))).subquery()
    first = select(part.c.ablation_id, func.min(part.c.ahead)).where(part.c.ablation_id.in_(ablation_ids))
    found = {row[0]: int(row[1]) for row in connection.execute(first.group_by(part.c.ablation_id))}
    return {row.ablation_id: QueuePlace(blocks_ahead=found[row.ablation_id], rest_s=row.rest_s) for row in waiting}


_QUEUED = blocks.c.state == BlockState.QUEUED


def _waiting(ablation_ids: Collection[str]) -> Select[Any]:
    """Select the least priority and turn of the queued blocks of each ablation: no first block stands behind these."""
    query = select(
        blocks.c.ablation_id,
        blocks.c.node_class,
        func.min(blocks.c.priority).label("priority"),
        func.min(blocks.c.turn).label("turn"),
        (func.min(blocks.c.not_before) - db_now()).label("rest_s"),
    )
    query = query.where(_QUEUED, blocks.c.ablation_id.in_(ablation_ids))
    return query.group_by(blocks.c.ablation_id, blocks.c.node_class)


def _not_behind(waiting: Sequence[Row[Any]]) -> Iterator[ColumnElement[bool]]:
    """Yield for each node class the condition of the blocks that do not stand behind all of these."""
    for node_class in sorted({row.node_class for row in waiting}):
        own = [row for row in waiting if row.node_class == node_class]
        last = min(row.priority for row in own)
        turn = max(row.turn for row in own if row.priority == last)
        before = or_(blocks.c.priority > last, and_(blocks.c.priority == last, blocks.c.turn <= turn))
        yield and_(blocks.c.node_class == node_class, before)


def holders(connection: Connection, ablation_ids: Collection[str]) -> list[Row[Any]]:
    """Return the running blocks of these ablations: node's name, seconds since it spoke, seconds left of the lease."""
    query = select(
        blocks.c.ablation_id,
        blocks.c["index"].label("block_index"),
        nodes.c.name,
        (db_now() - nodes.c.seen_at).label("silent_s"),
        (blocks.c.lease_until - db_now()).label("lease_s"),
    ).join(nodes, nodes.c.id == blocks.c.node_id)
    mine = (blocks.c.state == BlockState.RUNNING, blocks.c.ablation_id.in_(ablation_ids))
    return list(connection.execute(query.where(*mine).order_by(blocks.c.ablation_id, blocks.c["index"])))


def nodes_of(connection: Connection, node_classes: Collection[str]) -> list[Row[Any]]:
    """Return the nodes of these classes: what stops them, lanes and devices, and how long they were silent."""
    query = select(
        nodes.c.name,
        nodes.c.node_class,
        nodes.c.draining,
        nodes.c.quarantined_reason,
        nodes.c.lanes,
        nodes.c.num_devices,
        (db_now() - nodes.c.seen_at).label("silent_s"),
    )
    return list(connection.execute(query.where(nodes.c.node_class.in_(node_classes)).order_by(nodes.c.name)))


def block_seconds(connection: Connection) -> dict[str, float]:
    """Return how long a block took of late, by node class; broken attempts are part of it."""
    newest = union_all(_newest(AblationState.COMPLETED), _newest(AblationState.RUNNING)).subquery()
    pace = func.sum(newest.c.device_s) / func.sum(newest.c.blocks_done)
    rows = connection.execute(select(newest.c.node_class, pace).group_by(newest.c.node_class))
    return {node_class: float(seconds) for node_class, seconds in rows}


def _newest(state: AblationState) -> Select[Any]:
    query = select(ablations.c.node_class, ablations.c.device_s, ablations.c.blocks_done)
    query = query.where(ablations.c.state == state, ablations.c.blocks_done > 0)
    return select(query.order_by(ablations.c.id.desc()).limit(_PACE_OF).subquery())


def needs(connection: Connection, ablation_ids: Collection[str]) -> dict[str, Needs]:
    """Return what the blocks of these ablations need, which is the same for all of one."""
    query = select(blocks.c.ablation_id, blocks.c.lanes, blocks.c.num_devices)
    rows = connection.execute(query.where(blocks.c["index"] == 0, blocks.c.ablation_id.in_(ablation_ids)))
    return {row.ablation_id: Needs(lanes=row.lanes, devices=row.num_devices) for row in rows}
