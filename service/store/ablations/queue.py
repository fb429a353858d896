"""The queue around unfinished ablations: places, running blocks, nodes and the recent pace.

Every function answers for many ablations in one query.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Row,
    Select,
    bindparam,
    case,
    func,
    literal_column,
    select,
    union_all,
)

from experiments.outcomes import AblationState, BlockState
from service.store.access.tokens import has_revoked_key
from service.store.blocks.turns import WAITS
from service.store.nodes.placement import Needs
from service.store.tables import ablations, attempts, blocks, db_now, nodes

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


def _places() -> Select[Any]:
    """Count from turns, without reading blocks: an ablation's queued blocks have its turn and those that follow."""
    other = ablations.alias("other")
    is_higher = other.c.priority > ablations.c.priority
    first = ablations.c.turn - other.c.turn + case((other.c.id < ablations.c.id, 1), else_=0)
    last = first + ablations.c.blocks_queued - 1

    def before(turns: ColumnElement[int]) -> ColumnElement[int]:
        all_of_it = is_higher | (turns > other.c.blocks_queued)
        count = case((all_of_it, other.c.blocks_queued), (turns > 0, turns), else_=0)
        return func.coalesce(func.sum(count), 0)

    beside = (other.c.priority == ablations.c.priority) & (other.c.id != ablations.c.id) & (last > 0)
    in_queue = (other.c.node_class == ablations.c.node_class) & (other.c.blocks_queued > literal_column("0"))
    needs = (blocks.c.lanes, blocks.c.num_devices)
    query = select(ablations.c.id, before(first), before(last), _pause_s().label("pause_s"), *needs)
    one_block = (blocks.c.ablation_id == ablations.c.id) & (blocks.c["index"] == 0)
    query = query.select_from(ablations.join(blocks, one_block).outerjoin(other, in_queue & (is_higher | beside)))
    return query.where(ablations.c.id.in_(_IDS), WAITS).group_by(ablations.c.id, *needs)


def _pause_s() -> ColumnElement[float]:
    queued = blocks.alias("queued")
    own = (queued.c.ablation_id == ablations.c.id, queued.c.state == BlockState.QUEUED)
    may_run = select(queued.c.id).where(*own, queued.c.not_before <= db_now()).exists()
    first_end = select(func.min(queued.c.not_before)).where(*own).scalar_subquery()
    return case((may_run, 0.0), else_=first_end - db_now())


_PLACES = _places()


def places(connection: Connection, ablation_ids: Collection[str]) -> dict[str, QueuePlace]:
    """Return the places of those ablations that have a queued block."""
    rows = connection.execute(_PLACES, {"ids": list(ablation_ids)})
    return {
        ablation_id: QueuePlace(
            blocks_ahead=int(ahead),
            blocks_between=int(between),
            pause_s=float(pause_s),
            needs=Needs(lanes=lanes, devices=devices),
        )
        for ablation_id, ahead, between, pause_s, lanes, devices in rows
    }


_RUNNING = (
    select(
        blocks.c.ablation_id,
        blocks.c.node_class,
        blocks.c["index"].label("block_index"),
        nodes.c.name,
        (db_now() - nodes.c.seen_at).label("silent_s"),
        (blocks.c.lease_until - db_now()).label("lease_s"),
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


_NODES = (
    select(
        nodes.c.name,
        nodes.c.node_class,
        nodes.c.draining,
        nodes.c.quarantined_reason,
        nodes.c.lanes,
        nodes.c.num_devices,
        (db_now() - nodes.c.seen_at).label("silent_s"),
        has_revoked_key(nodes.c.name).label("revoked"),
    )
    .where(nodes.c.node_class.in_(_CLASSES))
    .order_by(nodes.c.name)
)


def nodes_of(connection: Connection, node_classes: Collection[str]) -> Sequence[Row[Any]]:
    """Return the nodes of these classes: reasons to stop, lanes, devices, and seconds of silence."""
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
