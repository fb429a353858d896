"""What stands between waiting ablations and a node: their places in the queue, the nodes, and the recent pace.

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
from service.store.columns import db_now
from service.store.nodes.placement import Needs
from service.store.tables import ablations, attempts, blocks, nodes, trials

_PACE_OF = 20
"""Newest finished ablations whose blocks tell the pace."""

# The statements are built once: to build them costs more than to run them.
_IDS: BindParameter[Any] = bindparam("ids", expanding=True)
_CLASSES: BindParameter[Any] = bindparam("classes", expanding=True)


@dataclass(frozen=True, kw_only=True)
class QueuePlace:
    """Where the first block of an ablation stands in the queue of its node class."""

    blocks_ahead: int
    blocks_between: int
    """Of others, given out before its last one; those ahead of its first among them."""
    rest_s: float
    """Until one of its blocks may be claimed: a pause after an attempt that broke; 0 or less for none."""


def _places() -> Select[Any]:
    """Count without looking at blocks: the queued ones of an ablation have its turn and those that follow."""
    other = ablations.alias("other")
    is_higher = other.c.priority > ablations.c.priority
    first = ablations.c.turn - other.c.turn + case((other.c.id < ablations.c.id, 1), else_=0)
    last = first + ablations.c.blocks_queued - 1

    def before(turns: ColumnElement[int]) -> ColumnElement[int]:
        all_of_it = is_higher | (turns > other.c.blocks_queued)
        counted = case((all_of_it, other.c.blocks_queued), (turns > 0, turns), else_=0)
        return func.coalesce(func.sum(counted), 0)

    beside = (other.c.priority == ablations.c.priority) & (other.c.id != ablations.c.id) & (last > 0)
    in_queue = (other.c.node_class == ablations.c.node_class) & (other.c.blocks_queued > literal_column("0"))
    found = select(ablations.c.id, before(first), before(last), _rest_s().label("rest_s"))
    found = found.select_from(ablations.outerjoin(other, in_queue & (is_higher | beside)))
    return found.where(ablations.c.id.in_(_IDS), WAITS).group_by(ablations.c.id)


def _rest_s() -> ColumnElement[float]:
    queued = (blocks.c.ablation_id == ablations.c.id, blocks.c.state == BlockState.QUEUED)
    may_run = select(blocks.c.id).where(*queued, blocks.c.not_before <= db_now()).exists()
    first_end = select(func.min(blocks.c.not_before)).where(*queued).scalar_subquery()
    return case((may_run, 0.0), else_=first_end - db_now())


_PLACES = _places()


def places(connection: Connection, ablation_ids: Collection[str]) -> dict[str, QueuePlace]:
    """Return the place of every ablation among these that has a queued block."""
    rows = connection.execute(_PLACES, {"ids": list(ablation_ids)})
    return {
        name: QueuePlace(blocks_ahead=int(ahead), blocks_between=int(between), rest_s=float(rest))
        for name, ahead, between, rest in rows
    }


_HOLDERS = (
    select(
        blocks.c.ablation_id,
        blocks.c["index"].label("block_index"),
        nodes.c.name,
        (db_now() - nodes.c.seen_at).label("silent_s"),
        (blocks.c.lease_until - db_now()).label("lease_s"),
    )
    .join(nodes, nodes.c.id == blocks.c.node_id)
    .where(blocks.c.state == BlockState.RUNNING, blocks.c.ablation_id.in_(_IDS))
    .order_by(blocks.c.ablation_id, blocks.c["index"])
)


def holders(connection: Connection, ablation_ids: Collection[str]) -> Sequence[Row[Any]]:
    """Return the running blocks of these ablations: node's name, seconds since it spoke, seconds left of the lease."""
    return connection.execute(_HOLDERS, {"ids": list(ablation_ids)}).all()


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
    """Return the nodes of these classes: what stops them, lanes and devices, and how long they were silent."""
    return connection.execute(_NODES, {"classes": list(node_classes)}).all()


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long a node class took of late, in seconds, by the attempts that finished their block."""

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
    """Return the recent pace by node class, of those that have finished a block."""
    return {
        node_class: Pace(block_s=float(seconds) / int(done), trial_s=float(seconds) / float(trials))
        for node_class, seconds, done, trials in connection.execute(_PACES)
    }


def _running() -> Select[Any]:
    """Sum up the trials by block first: to group all that is read lets SQLite go through all blocks.

    And once: PostgreSQL, which takes the blocks that run for one while it knows nothing of them, would for each.
    """
    runs = (blocks.c.state == BlockState.RUNNING, blocks.c.node_class.in_(_CLASSES))
    started, over, step_s = trials.c.started_at, trials.c.over_at, trials.c.step_s
    goes_on = started.is_not(None) & over.is_(None)
    steps_s = (trials.c.steps_total - trials.c.steps_done) * step_s
    sums = {
        "trials_waiting": func.sum(case((started.is_(None), 1), else_=0)),
        "trials_starting": func.sum(case((goes_on & step_s.is_(None), 1), else_=0)),
        "starting_s": func.sum(case((goes_on & step_s.is_(None), db_now() - started), else_=0.0)),
        "steps_s": func.sum(case((goes_on, func.coalesce(steps_s, 0.0)), else_=0.0)),
        "trials_over": func.count(over),
        "last_over": func.max(over),
    }
    found = select(trials.c.block_id, *(one.label(name) for name, one in sums.items()))
    found = found.where(trials.c.block_id.in_(select(blocks.c.id).where(*runs))).group_by(trials.c.block_id)
    of_block = found.cte("of_block").prefix_with("MATERIALIZED", dialect="postgresql")
    names = ("name", "settled_s", "blocks_done", "blocks_planned", "trials_planned")
    query = select(blocks.c.ablation_id, blocks.c.node_class, *(ablations.c[name] for name in names), of_block)
    query = query.add_columns((of_block.c.last_over - attempts.c.started_at).label("trials_over_s"))
    query = query.join_from(blocks, ablations, ablations.c.id == blocks.c.ablation_id)
    query = query.join(attempts, attempts.c.id == blocks.c.attempt_id).join(
        of_block, of_block.c.block_id == blocks.c.id
    )
    return query.where(*runs)


_RUNNING = _running()


def running(connection: Connection, node_classes: Collection[str]) -> Sequence[Row[Any]]:
    """Return the blocks that run on these classes: what their ablations took so far, and how far their trials are.

    `trials_waiting` were not heard of yet, `trials_starting` have told no step's time, for `starting_s` seconds in all;
    the others need `steps_s` for their steps. `trials_over` have ended, the last `trials_over_s` after the attempt
    began.
    """
    return connection.execute(_RUNNING, {"classes": list(node_classes)}).all()


_NEEDS = select(blocks.c.ablation_id, blocks.c.lanes, blocks.c.num_devices).where(
    blocks.c["index"] == 0, blocks.c.ablation_id.in_(_IDS)
)


def needs(connection: Connection, ablation_ids: Collection[str]) -> dict[str, Needs]:
    """Return what the blocks of these ablations need, which is the same for all of one."""
    rows = connection.execute(_NEEDS, {"ids": list(ablation_ids)})
    return {row.ablation_id: Needs(lanes=row.lanes, devices=row.num_devices) for row in rows}
