"""Whose turn it is: equal priorities of a node class alternate by block.

Every ablation has a turn, which is that of its next block, and blocks are given out by priority, turn, age of the
ablation and index. Giving a block out moves its ablation one turn on. An ablation that joins starts at the turn that
its queue has reached. So whoever waits gets one block in every round, nobody who comes later is served twice before,
and neither a claim nor a retry touches the other blocks of an ablation.
"""

from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, case, func, literal_column, select, text

from service.errors import AblationOver
from service.lifecycle import OVER, EventKind
from service.store.tables import ablations, turns
from service.store.transitions import Transitions

ORDER: tuple[ColumnElement[Any], ...] = (ablations.c.priority.desc(), ablations.c.turn, ablations.c.id)
"""How ablations of one node class are served; blocks of one by index."""

WAITS: ColumnElement[bool] = ablations.c.blocks_queued > literal_column("0")
"""Whether an ablation is in the queue, as the queue's index says it."""

CATCH_UP = 3
"""Turns that an ablation may make up for at once after a time in which nobody could take its blocks."""

_REACH = text(
    "INSERT INTO turns (node_class, priority, turn) VALUES (:node_class, :priority, :turn) "
    "ON CONFLICT (node_class, priority) DO UPDATE SET turn = excluded.turn WHERE turns.turn < excluded.turn"
)


def reached(node_class: ColumnElement[str] | str, priority: ColumnElement[int] | int) -> ColumnElement[int]:
    """Return the turn that the queue of a node class and priority has reached."""
    turn = select(turns.c.turn).where(turns.c.node_class == node_class, turns.c.priority == priority)
    return func.coalesce(turn.scalar_subquery(), 0)


_REACHED = reached(ablations.c.node_class, ablations.c.priority)
_PLACE = select(ablations.c.node_class, ablations.c.priority, ablations.c.turn, _REACHED.label("reached"))


def take_turn(connection: Connection, transitions: Transitions, ablation_id: str) -> None:
    """Note that a block of an ablation, which is locked, is given out.

    An ablation that stayed far behind, because nobody could take its blocks, goes on with the others.
    """
    now: Row[Any] = connection.execute(_PLACE.where(ablations.c.id == ablation_id)).one()
    if now.turn > now.reached:
        connection.execute(_REACH, {"node_class": now.node_class, "priority": now.priority, "turn": now.turn})
    behind = now.turn < now.reached - CATCH_UP
    transitions.set_columns(turn=(now.reached if behind else now.turn) + 1)


def join_queue(transitions: Transitions) -> None:
    """Let an ablation of which no block waited, and which is locked, go on no earlier than where its queue is now."""
    transitions.set_columns(turn=case((WAITS | (ablations.c.turn > _REACHED), ablations.c.turn), else_=_REACHED))


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
