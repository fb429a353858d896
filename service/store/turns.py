"""Whose turn it is: equal priorities of a node class alternate by block.

Every waiting block has a turn, and blocks are given out by priority, turn, age of the ablation and index. An ablation
that joins starts at the turn that its queue has reached, and its blocks follow one turn each. So whoever waits gets one
block in every round, nobody who comes later is served twice before, and a claim reads the first row of an index.
"""

from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, ScalarSelect, func, select, text, update

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

_WAITING = (BlockState.HELD, BlockState.QUEUED)
_OPEN = (*_WAITING, BlockState.RUNNING)

_REACH = text(
    "INSERT INTO turns (node_class, priority, turn) VALUES (:node_class, :priority, :turn) "
    "ON CONFLICT (node_class, priority) DO UPDATE SET turn = excluded.turn WHERE turns.turn < excluded.turn"
)


def reached(node_class: ColumnElement[str] | str, priority: ColumnElement[int] | int) -> ScalarSelect[int]:
    """Return the turn that the queue of a node class and priority has reached."""
    turn = select(turns.c.turn).where(turns.c.node_class == node_class, turns.c.priority == priority)
    return select(func.coalesce(turn.scalar_subquery(), 0)).scalar_subquery()


def reach(connection: Connection, node_class: str, priority: int, turn: int) -> None:
    """Note that a block of this turn was given out."""
    if turn > (connection.scalar(select(reached(node_class, priority))) or 0):
        connection.execute(_REACH, {"node_class": node_class, "priority": priority, "turn": turn})


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
        return max(now, block.turn + 1)
    later = update(blocks).where(blocks.c.id.in_([row.id for row in rows]))
    connection.execute(later.values(turn=blocks.c.turn + 1))
    return min(row.turn for row in rows)


def join_queue(connection: Connection, ablation_id: str, *, first: int) -> None:
    """Give the waiting blocks of an ablation from the index `first` on turns that start where its queue is now."""
    row = connection.execute(
        select(ablations.c.node_class, ablations.c.priority).where(ablations.c.id == ablation_id)
    ).one()
    waiting = update(blocks).where(blocks.c.ablation_id == ablation_id, blocks.c.state.in_(_WAITING))
    turn = reached(row.node_class, row.priority) + blocks.c["index"] - first
    connection.execute(waiting.where(blocks.c["index"] >= first).values(turn=turn))


def set_priority(connection: Connection, ablation_id: str, priority: int, *, actor: str) -> None:
    """Change the priority of an ablation's blocks that are not over. Raises AblationOver when all are."""
    first = _lock_open(connection, ablation_id)
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
    join_queue(connection, ablation_id, first=first)
    transitions = Transitions(connection, ablation_id, actor=actor)
    reason, data = f"priority {old} became {priority}", {"priority": priority}
    transitions.add_event(EventKind.PRIORITY, ablation_id, reason=reason, data=data)
    transitions.flush()


def _lock_open(connection: Connection, ablation_id: str) -> int:
    """Lock the blocks that are not over, by id; return the lowest index of those that wait, 0 where none does."""
    index = blocks.c["index"].label("block_index")
    own = select(blocks.c.state, index).where(blocks.c.ablation_id == ablation_id, blocks.c.state.in_(_OPEN))
    rows = connection.execute(own.order_by(blocks.c.id).with_for_update()).all()
    return min((row.block_index for row in rows if row.state in _WAITING), default=0)
