"""Looks: the blocks beyond one are held until it has decided, then they run up to the next look, or not at all."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select, func, select

from experiments.outcomes import AblationState, BlockState
from service.lifecycle import OutboxKind
from service.store import outbox
from service.store.blocks.completion import cancel_blocks, complete_if_done
from service.store.blocks.transitions import Transitions, lock_ablation
from service.store.blocks.turns import join_queue
from service.store.tables import blocks

_INDEX = blocks.c["index"].label("block_index")


def look_due(connection: Connection, ablation_id: str) -> int | None:
    """Return the number of blocks of the look that is due: all below the first held one are over. None if none is."""
    states = select(blocks.c.state, func.min(blocks.c["index"])).where(blocks.c.ablation_id == ablation_id)
    first = {row[0]: int(row[1]) for row in connection.execute(states.group_by(blocks.c.state))}
    if BlockState.QUEUED in first or BlockState.RUNNING in first:
        return None
    return first.get(BlockState.HELD)


def go_on(connection: Connection, ablation_id: str, until: int, *, after: int, reason: str) -> None:
    """Queue the held blocks below the index `until`, unless another look than that of `after` blocks is due by now."""
    held = _lock_held(connection, ablation_id)
    if not _is_due(connection, ablation_id, held, after):
        return
    transitions = Transitions(connection, ablation_id, actor="judge", locked=AblationState.RUNNING)
    ids = [row.id for row in held if row.block_index < until]
    join_queue(transitions)
    transitions.move(ids, BlockState.HELD, BlockState.QUEUED, reason=reason)
    transitions.add_row(outbox.NEW, outbox.row(OutboxKind.WAKE, held[0].node_class))
    transitions.flush()


def stop(connection: Connection, ablation_id: str, *, after: int, reason: str) -> None:
    """Cancel all held blocks and end the ablation, unless another look than that of `after` blocks is due by now."""
    held = _lock_held(connection, ablation_id)
    if not _is_due(connection, ablation_id, held, after):
        return
    transitions = Transitions(connection, ablation_id, actor="judge", locked=AblationState.RUNNING)
    cancel_blocks(connection, transitions, ablation_id, held, reason=f"not needed: {reason}")
    complete_if_done(connection, ablation_id, transitions.flush())


def _lock_held(connection: Connection, ablation_id: str) -> list[Row[Any]]:
    query: Select[Any] = select(blocks.c.id, blocks.c.state, blocks.c.node_class, _INDEX).where(
        blocks.c.ablation_id == ablation_id, blocks.c.state == BlockState.HELD
    )
    return list(connection.execute(query.order_by(blocks.c.id).with_for_update()))


def _is_due(connection: Connection, ablation_id: str, held: Sequence[Row[Any]], after: int) -> bool:
    """Lock the ablation; tell whether the look that was decided is due still, which it is only while that runs.

    A cancellation or another process may have been faster.
    """
    state = lock_ablation(connection, ablation_id)
    first = min((row.block_index for row in held), default=None)
    return state == AblationState.RUNNING and first == after
