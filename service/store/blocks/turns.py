"""Whose turn it is: equal priorities of a node class alternate by block.

Every ablation has a turn, which is that of its next block, and blocks are given out by priority, turn, age of the
ablation and index. Giving a block out moves its ablation one turn on. An ablation that joins starts at the turn that
its queue has reached. So whoever waits gets one block in every round, nobody who comes later is served twice before,
and neither a claim nor a retry touches the other blocks of an ablation.
"""

from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, bindparam, case, func, literal_column, select

from service.errors import AblationOver
from service.lifecycle import OVER, EventKind
from service.store.blocks.transitions import Transitions
from service.store.inserts import Target
from service.store.tables import ablations, turns

ORDER: tuple[ColumnElement[Any], ...] = (ablations.c.priority.desc(), ablations.c.turn, ablations.c.id)
"""How ablations of one node class are served; blocks of one by index."""

WAITS: ColumnElement[bool] = ablations.c.blocks_queued > literal_column("0")
"""Whether an ablation is in the queue, as the queue's index says it."""

CATCH_UP = 3
"""Turns that an ablation may make up for at once after a time in which nobody could take its blocks."""

_REACHED_BY = Target(table=turns, raised="turn")


def reached(node_class: ColumnElement[str] | str, priority: ColumnElement[int] | int) -> ColumnElement[int]:
    """Return the turn that the queue of a node class and priority has reached."""
    turn = select(turns.c.turn).where(turns.c.node_class == node_class, turns.c.priority == priority)
    return func.coalesce(turn.scalar_subquery(), literal_column("0"))


_REACHED = reached(ablations.c.node_class, ablations.c.priority)
_PLACE = (
    select(ablations.c.state, ablations.c.node_class, ablations.c.priority, ablations.c.turn, _REACHED.label("reached"))
    .where(ablations.c.id == bindparam("ablation"))
    .with_for_update()
)
_GO_ON = case((WAITS | (ablations.c.turn > _REACHED), ablations.c.turn), else_=_REACHED)


def lock_place(connection: Connection, ablation_id: str) -> Row[Any]:
    """Lock an ablation; return its state and its place in the queue."""
    return connection.execute(_PLACE, {"ablation": ablation_id}).one()


def take_turn(transitions: Transitions, place: Row[Any]) -> None:
    """Note that a block of the ablation that has this place, and is locked, is given out.

    An ablation that stayed far behind, because nobody could take its blocks, goes on with the others.
    """
    if place.turn > place.reached:
        reached_by = {"node_class": place.node_class, "priority": place.priority, "turn": place.turn}
        transitions.add_row(_REACHED_BY, reached_by)
    behind = place.turn < place.reached - CATCH_UP
    transitions.set_columns(turn=(place.reached if behind else place.turn) + 1)


def join_queue(transitions: Transitions) -> None:
    """Let an ablation of which no block waited, and which is locked, go on no earlier than where its queue is now."""
    transitions.set_columns(turn=_GO_ON)


def set_priority(connection: Connection, ablation_id: str, priority: int, *, actor: str) -> None:
    """Change the priority of an ablation that is not over. Raises AblationOver for one that is."""
    transitions = Transitions(connection, ablation_id, actor=actor)
    state = transitions.lock()
    if state in OVER:
        raise AblationOver(f"ablation {ablation_id} is {state}; its priority decides nothing any more")
    old = connection.scalar(select(ablations.c.priority).where(ablations.c.id == ablation_id))
    if old == priority:
        return
    transitions.set_columns(priority=priority, turn=reached(ablations.c.node_class, priority) + 1)
    reason, data = f"priority {old} became {priority}", {"priority": priority}
    transitions.add_event(EventKind.PRIORITY, ablation_id, reason=reason, data=data)
    transitions.flush()
