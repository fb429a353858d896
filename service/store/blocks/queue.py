"""The queue around unfinished ablations: places, running blocks, nodes and the recent pace.

Every function answers for many ablations in one or two queries.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Row,
    Select,
    bindparam,
    case,
    func,
    select,
    union_all,
)

from ablate.experiments.outcomes import AblationState, BlockState
from ablate.service.store.access.tokens import has_revoked_key
from ablate.service.store.blocks.claims import LIMIT_S, TAKES_S
from ablate.service.store.blocks.turns import WAITS
from ablate.service.store.nodes.placement import Needs, may_run_again
from ablate.service.store.tables import SILENT_S, ablations, attempts, blocks, db_now, nodes

_PACE_OF = 20
"""Ablations whose blocks give the pace: so many completed and so many running ones, the newest."""

# Each statement is built once: building costs more than running.
_IDS: BindParameter[Any] = bindparam("ids", expanding=True)
_CLASSES: BindParameter[Any] = bindparam("classes", expanding=True)


@dataclass(frozen=True, kw_only=True)
class QueuePlace:
    """An ablation's place in the queue of its node class."""

    blocks_ahead: int
    """Blocks of others that nodes claim before its first queued one."""
    blocks_between: int
    """Blocks of others that nodes claim before its last queued one."""
    pause_s: float
    """Seconds until its first queued block may run after a broken attempt; 0 or less without a pause."""
    needs: Needs
    """Shared by all of its blocks."""


def _pause_s() -> ColumnElement[float]:
    queued = blocks.alias("queued")
    own = (queued.c.ablation_id == ablations.c.id, queued.c.state == BlockState.QUEUED)
    may_run = select(queued.c.id).where(*own, may_run_again(queued.c.not_before)).exists()
    first_end = select(func.min(queued.c.not_before)).where(*own).scalar_subquery()
    return case((may_run, 0.0), else_=first_end - db_now())


_OWN = (
    select(
        *(ablations.c.id, _pause_s().label("pause_s"), TAKES_S.label("takes_s")),
        *(blocks.c[name] for name in ("lanes", "back_ends", "num_devices")),
    )
    .join(blocks, (blocks.c.ablation_id == ablations.c.id) & (blocks.c["index"] == 0))
    .where(ablations.c.id.in_(_IDS), WAITS)
)
_QUEUE = select(
    ablations.c.node_class, ablations.c.id, ablations.c.priority, ablations.c.turn, ablations.c.blocks_queued
).where(
    WAITS,
    ablations.c.node_class.in_(select(ablations.c.node_class).where(ablations.c.id.in_(_IDS)).scalar_subquery()),
)


def places(connection: Connection, ablation_ids: Collection[str]) -> dict[str, QueuePlace]:
    """Return the places of those ablations that have a queued block."""
    own = connection.execute(_OWN, {"ids": list(ablation_ids)}).all()
    if not own:
        return {}
    queues: dict[str, list[Any]] = {}
    for row in connection.execute(_QUEUE.order_by(ablations.c.id), {"ids": [row.id for row in own]}):
        queues.setdefault(row.node_class, []).append(row)
    counts = {name: count for rows in queues.values() for name, count in _counts(rows, {row.id for row in own})}
    return {
        row.id: QueuePlace(
            blocks_ahead=counts[row.id][0],
            blocks_between=counts[row.id][1],
            pause_s=float(row.pause_s),
            needs=needs_of(row),
        )
        for row in own
    }


def needs_of(row: Row[Any]) -> Needs:
    """Return the needs of an ablation's blocks."""
    return Needs(lanes=row.lanes, back_ends=row.back_ends, devices=row.num_devices, takes_s=float(row.takes_s))


def _counts(rows: Sequence[Any], wanted: Collection[str]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the blocks before the first and before the last queued block of the `wanted` ablations.

    `rows` is the queue of one node class by id. An ablation's queued blocks have its turn and those that follow.
    """
    priority, turn, queued = np.array([row[2:] for row in rows], dtype=np.int64).T
    for place, row in enumerate(rows):
        if row.id not in wanted:
            continue
        higher = int(queued[priority > row.priority].sum())
        beside = priority == row.priority
        beside[place] = False
        turns = row.turn - turn[beside] + (np.arange(len(rows)) < place)[beside]
        first = int(np.clip(turns, 0, queued[beside]).sum())
        last = int(np.clip(turns + row.blocks_queued - 1, 0, queued[beside]).sum())
        yield row.id, (higher + first, higher + last)


_WAITING: Select[Any] = (
    select(
        *(ablations.c[name] for name in ("node_class", "blocks_queued", "blocks_done", "settled_s", "device_s")),
        *(ablations.c[name] for name in ("device_minutes", "blocks_planned", "trials_planned")),
        *(blocks.c[name] for name in ("lanes", "back_ends", "num_devices")),
        *(LIMIT_S.label("limit_s"), TAKES_S.label("takes_s")),
    )
    .join(blocks, (blocks.c.ablation_id == ablations.c.id) & (blocks.c["index"] == 0))
    .where(WAITS)
)


def waiting(connection: Connection) -> Sequence[Row[Any]]:
    """Return every ablation with a queued block: counts, times, the needs of its blocks, and the limit of one."""
    return connection.execute(_WAITING).all()


_RUNNING = (
    select(
        blocks.c.ablation_id,
        blocks.c.node_class,
        blocks.c["index"].label("block_index"),
        nodes.c.name,
        SILENT_S.label("silent_s"),
        (blocks.c.lease_until - db_now()).label("lease_s"),
        blocks.c.message.label("waits_for"),
        (db_now() - attempts.c.started_at).label("elapsed_s"),
        *(ablations.c[name] for name in ("settled_s", "blocks_done", "blocks_planned", "trials_planned")),
    )
    .join(nodes, nodes.c.id == blocks.c.node_id)
    .join(attempts, attempts.c.id == blocks.c.attempt_id)
    .join(ablations, ablations.c.id == blocks.c.ablation_id)
    .where(blocks.c.state == BlockState.RUNNING, blocks.c.node_class.in_(_CLASSES))
    .order_by(blocks.c.ablation_id, blocks.c["index"])
)


def running(connection: Connection, node_classes: Collection[str]) -> Sequence[Row[Any]]:
    """Return the running blocks of these classes: node, its silence, lease left, time so far, ablation's counts."""
    return connection.execute(_RUNNING, {"classes": list(node_classes)}).all()


_NODES: Select[Any] = (
    select(
        nodes.c.name,
        nodes.c.node_class,
        nodes.c.draining,
        nodes.c.quarantined_reason,
        nodes.c.probe_began_at,
        (nodes.c.probe_at - db_now()).label("probe_in_s"),
        nodes.c.lanes,
        nodes.c.failed_back_ends,
        nodes.c.num_devices,
        SILENT_S.label("silent_s"),
        (nodes.c.ends_at - db_now()).label("left_s"),
        has_revoked_key(nodes.c.name).label("revoked"),
    )
    .where(nodes.c.node_class.in_(_CLASSES), nodes.c.left_at.is_(None))
    .order_by(nodes.c.name)
)


def nodes_of(connection: Connection, node_classes: Collection[str]) -> Sequence[Row[Any]]:
    """Return the nodes of these classes: reasons to stop, lanes, back ends, devices, and seconds of silence."""
    return connection.execute(_NODES, {"classes": list(node_classes)}).all()


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Mean seconds that a node class took of late, by the attempts that finished their block."""

    block_s: float
    trial_s: float


def _newest(state: AblationState) -> Select[Any]:
    trials = (1.0 * ablations.c.blocks_done * ablations.c.trials_planned / ablations.c.blocks_planned).label("trials")
    query = select(ablations.c.node_class, ablations.c.settled_s, ablations.c.blocks_done, trials)
    query = query.where(ablations.c.state == state, ablations.c.blocks_done > 0)
    return select(query.order_by(ablations.c.id.desc()).limit(_PACE_OF).subquery())


def _paces() -> Select[Any]:
    newest = union_all(_newest(AblationState.COMPLETED), _newest(AblationState.RUNNING)).subquery()
    sums = [func.sum(newest.c[name]) for name in ("settled_s", "blocks_done", "trials")]
    return select(newest.c.node_class, *sums).group_by(newest.c.node_class)


_PACES = _paces()


def paces(connection: Connection) -> dict[str, Pace]:
    """Return the recent pace of the node classes that have finished a block."""
    return {
        node_class: Pace(block_s=float(seconds) / int(done), trial_s=float(seconds) / float(trials))
        for node_class, seconds, done, trials in connection.execute(_PACES)
    }
