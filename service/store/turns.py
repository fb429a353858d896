"""Whose turn it is: equal priorities of a node class alternate by block.

Every waiting block has a turn, and blocks are given out by priority, turn, age of the ablation and index. An ablation
that joins starts at the turn that its queue has reached, and its blocks follow one turn each. So whoever waits gets one
block in every round, nobody who comes later is served twice before, and a claim reads the first row of an index.
"""

from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, ScalarSelect, bindparam, func, select, text, update

from experiments.outcomes import BlockState
from service.errors import AblationOver
from service.lifecycle import OVER, EventKind
from service.store.tables import ablations, blocks, turns
from service.store.transitions import Transitions, lock_ablation

ORDER: tuple[ColumnElement[Any], ...] = (
    blocks.c.priority.desc(),
    blocks.c.turn,
    blocks.c.ablation_id,
    blocks.c["index"],
)
"""How blocks of one node class are given out."""

CATCH_UP = 3
"""Turns that an ablation may make up for at once after a time in which nobody could take its blocks."""

_WAITING = (BlockState.HELD, BlockState.QUEUED)
_OPEN = (*_WAITING, BlockState.RUNNING)

_SET_TURN = update(blocks).where(blocks.c.id == bindparam("own_id")).values(turn=bindparam("own_turn"))

_REACH = text(
    "INSERT INTO turns (node_class, priority, turn) VALUES (:node_class, :priority, :turn) "
    "ON CONFLICT (node_class, priority) DO UPDATE SET turn = excluded.turn WHERE turns.turn < excluded.turn"
)


def reached(node_class: ColumnElement[str] | str, priority: ColumnElement[int] | int) -> ScalarSelect[int]:
    """Return the turn that the queue of a node class and priority has reached."""
    turn = select(turns.c.turn).where(turns.c.node_class == node_class, turns.c.priority == priority)
    return select(func.coalesce(turn.scalar_subquery(), 0)).scalar_subquery()


def took_turn(connection: Connection, block: Row[Any]) -> None:
    """Note that a waiting block was given out.

    An ablation that stayed far behind, because nobody could take its blocks, goes on with the others.
    """
    now = connection.scalar(select(reached(block.node_class, block.priority))) or 0
    if block.turn > now:
        queue = {"node_class": block.node_class, "priority": block.priority, "turn": block.turn}
        connection.execute(_REACH, queue)
    elif block.turn < now - CATCH_UP:
        join_queue(connection, block.ablation_id, later=1)


def next_turn(connection: Connection, block: Row[Any]) -> int:
    """Return the turn of a block that comes back to the queue: its ablation's next one; the others move one back.

    A retry is a block like any other, so that an ablation which breaks often gets no more of the nodes. A block that is
    being claimed at this moment is skipped instead of waited for: locks are taken on blocks first.
    """
    own = select(blocks.c.id, blocks.c.turn).where(
        blocks.c.ablation_id == block.ablation_id, blocks.c.state == BlockState.QUEUED
    )
    rows = connection.execute(own.order_by(blocks.c.id).with_for_update(skip_locked=True)).all()
    if not rows:
        now = connection.scalar(select(reached(block.node_class, block.priority))) or 0
        return max(now, int(block.turn) + 1)
    later = update(blocks).where(blocks.c.id.in_([row.id for row in rows]))
    connection.execute(later.values(turn=blocks.c.turn + 1))
    return min(int(row.turn) for row in rows)


def join_queue(connection: Connection, ablation_id: str, *, later: int = 0) -> None:
    """Give the waiting blocks of an ablation, in their order, turns that start `later` than where its queue is now."""
    queue = select(ablations.c.node_class, ablations.c.priority).where(ablations.c.id == ablation_id)
    row = connection.execute(queue).one()
    start = later + (connection.scalar(select(reached(row.node_class, row.priority))) or 0)
    waiting = select(blocks.c.id).where(blocks.c.ablation_id == ablation_id, blocks.c.state.in_(_WAITING))
    ordered = waiting.order_by(blocks.c.turn, blocks.c["index"]).with_for_update(skip_locked=True)
    ids = connection.execute(ordered).scalars().all()
    if ids:
        turns_of = [{"own_id": block_id, "own_turn": start + place} for place, block_id in enumerate(ids)]
        connection.execute(_SET_TURN, turns_of)


def set_priority(connection: Connection, ablation_id: str, priority: int, *, actor: str) -> None:
    """Change the priority of an ablation's blocks that are not over. Raises AblationOver when all are."""
    _lock_open(connection, ablation_id)
    state = lock_ablation(connection, ablation_id)
    if state in OVER:
        raise AblationOver(f"ablation {ablation_id} is {state}; its priority decides nothing any more")
    own = ablations.c.id == ablation_id
    old = connection.scalar(select(ablations.c.priority).where(own))
    if old == priority:
        return
    connection.execute(update(ablations).where(own).values(priority=priority))
    is_open = (blocks.c.ablation_id == ablation_id, blocks.c.state.in_(_OPEN))
    connection.execute(update(blocks).where(*is_open).values(priority=priority))
    join_queue(connection, ablation_id, later=1)
    transitions = Transitions(connection, ablation_id, actor=actor)
    reason, data = f"priority {old} became {priority}", {"priority": priority}
    transitions.add_event(EventKind.PRIORITY, ablation_id, reason=reason, data=data)
    transitions.flush()


def _lock_open(connection: Connection, ablation_id: str) -> None:
    own = select(blocks.c.id).where(blocks.c.ablation_id == ablation_id, blocks.c.state.in_(_OPEN))
    connection.execute(own.order_by(blocks.c.id).with_for_update()).all()
