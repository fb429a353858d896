"""What stands between waiting ablations and a node: their places in the queue, the nodes, and the pace of late.

Every function answers for many ablations in one query.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, Select, func, select, union_all

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
    """Return the place of every ablation among these that has a queued block."""
    ahead = func.row_number().over(partition_by=blocks.c.node_class, order_by=ORDER) - 1
    queued = select(blocks.c.ablation_id, blocks.c.not_before, ahead.label("ahead"))
    queue = queued.where(blocks.c.state == BlockState.QUEUED).subquery()
    first, ready = func.min(queue.c.ahead), func.min(queue.c.not_before) - db_now()
    own = select(queue.c.ablation_id, first, ready).where(queue.c.ablation_id.in_(ablation_ids))
    rows = connection.execute(own.group_by(queue.c.ablation_id))
    return {found: QueuePlace(blocks_ahead=int(place), rest_s=float(rest)) for found, place, rest in rows}


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
