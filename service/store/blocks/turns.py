"""The order of the queue: which ablation's block is next, between submission and claim.

Blocks are served by priority, turn and age of their ablation, then by index. An ablation's turn is that of its next
block, and a claim moves it one turn on, so equal priorities of a node class alternate by block. An ablation that joins
starts at the turn that its queue has reached: no newcomer gets two blocks before an ablation that waited already.
"""

from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, case, func, literal_column, select
from sqlalchemy.dialects import postgresql, sqlite

from ablate.service.errors import AblationOver
from ablate.service.lifecycle import OVER, EventKind
from ablate.service.store.blocks.transitions import Transitions
from ablate.service.store.tables import ablations, turns

ORDER: tuple[ColumnElement[Any], ...] = (ablations.c.priority.desc(), ablations.c.turn, ablations.c.id)
"""The order of ablations of one node class; the blocks of one go by index."""

WAITS: ColumnElement[bool] = ablations.c.blocks_queued > literal_column("0")
"""Whether an ablation is in the queue, in the words of the queue's index."""

CATCH_UP = 3
"""Turns that an ablation may make up for at once after a time in which no node could take its blocks."""


def reached(node_class: ColumnElement[str] | str, priority: ColumnElement[int] | int) -> ColumnElement[int]:
    """Return the turn that the queue of a node class and priority has reached."""
    turn = select(turns.c.turn).where(turns.c.node_class == node_class, turns.c.priority == priority)
    return func.coalesce(turn.scalar_subquery(), literal_column("0"))


_REACHED = reached(ablations.c.node_class, ablations.c.priority)
_PLACE = select(
    ablations.c.state, ablations.c.node_class, ablations.c.priority, ablations.c.turn, _REACHED.label("reached")
)


def lock_place(connection: Connection, ablation_id: str) -> Row[Any]:
    """Lock an ablation; return its state and its place in the queue."""
    return connection.execute(_PLACE.where(ablations.c.id == ablation_id).with_for_update(key_share=True)).one()


def take_turn(connection: Connection, transitions: Transitions, place: Row[Any]) -> None:
    """Move a locked ablation, which has this place and gave out a block, one turn on.

    An ablation that fell far behind, because no node could take its blocks, goes on with the others.
    """
    if place.turn > place.reached:
        raise_reached(connection, place.node_class, place.priority, place.turn)
    behind = place.turn < place.reached - CATCH_UP
    transitions.set_columns(turn=(place.reached if behind else place.turn) + 1)


def raise_reached(connection: Connection, node_class: str, priority: int, turn: int) -> None:
    """Store the turn that a queue has reached, unless it has reached a later one."""
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    row = insert(turns).values(node_class=node_class, priority=priority, turn=turn)
    connection.execute(
        row.on_conflict_do_update(
            index_elements=[turns.c.node_class, turns.c.priority],
            set_={"turn": row.excluded.turn},
            where=turns.c.turn < row.excluded.turn,
        )
    )


def join_queue(transitions: Transitions) -> None:
    """Let a locked ablation with no block in the queue go on no earlier than the turn that its queue has reached."""
    transitions.set_columns(turn=case((WAITS | (ablations.c.turn > _REACHED), ablations.c.turn), else_=_REACHED))


def set_priority(connection: Connection, ablation_id: str, priority: int, *, actor: str) -> None:
    """Change the priority of an ablation. Raises AblationOver if it is over."""
    transitions = Transitions(connection, ablation_id, actor=actor)
    state = transitions.lock()
    if state in OVER:
        raise AblationOver(f"ablation {ablation_id} is {state}; it has no blocks left to give a priority")
    old = connection.scalar(select(ablations.c.priority).where(ablations.c.id == ablation_id))
    if old == priority:
        return
    transitions.set_columns(priority=priority, turn=reached(ablations.c.node_class, priority) + 1)
    reason, data = f"priority {old} became {priority}", {"priority": priority}
    transitions.add_event(EventKind.PRIORITY, ablation_id, reason=reason, data=data)
    transitions.flush()
