"""Looks: a verdict before the last block, for ablations that were submitted with a schedule of them.

Blocks beyond the next look are held. When all blocks below are over, the background process judges them and calls
`go_on`, which queues the blocks up to the following look, or `stop`, which cancels the rest.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select, func, select

from ablate.experiments.outcomes import AblationState, BlockState
from ablate.service.lifecycle import OutboxKind
from ablate.service.store import outbox
from ablate.service.store.blocks.completion import cancel_blocks, complete_if_done
from ablate.service.store.blocks.transitions import Transitions, lock_ablation
from ablate.service.store.blocks.turns import join_queue
from ablate.service.store.tables import blocks

_INDEX = blocks.c["index"].label("block_index")


def look_due(connection: Connection, ablation_id: str) -> int | None:
    """Return the number of blocks of the due look, all of which are over; None if none is due."""
    states = select(blocks.c.state, func.min(blocks.c["index"])).where(blocks.c.ablation_id == ablation_id)
    first = {row[0]: int(row[1]) for row in connection.execute(states.group_by(blocks.c.state))}
    if BlockState.QUEUED in first or BlockState.RUNNING in first:
        return None
    return first.get(BlockState.HELD)


def go_on(connection: Connection, ablation_id: str, until: int, *, after: int, reason: str) -> None:
    """Queue the held blocks below the index `until`, if the look after `after` blocks is still the due one."""
    waiting = _lock_held(connection, ablation_id)
    if not _is_due(connection, ablation_id, waiting, after):
        return
    transitions = Transitions(connection, ablation_id, actor="judge", locked=AblationState.RUNNING)
    ids = [row.id for row in waiting if row.block_index < until]
    join_queue(transitions)
    transitions.move(ids, BlockState.HELD, BlockState.QUEUED, reason=reason)
    transitions.flush()
    outbox.add(connection, OutboxKind.WAKE, waiting[0].node_class)


def stop(connection: Connection, ablation_id: str, *, after: int, reason: str) -> None:
    """Cancel all held blocks and end the ablation, if the look after `after` blocks is still the due one."""
    waiting = _lock_held(connection, ablation_id)
    if not _is_due(connection, ablation_id, waiting, after):
        return
    transitions = Transitions(connection, ablation_id, actor="judge", locked=AblationState.RUNNING)
    cancel_blocks(connection, transitions, ablation_id, waiting, reason=f"not needed: {reason}")
    transitions.flush()
    complete_if_done(connection, ablation_id)


def _lock_held(connection: Connection, ablation_id: str) -> list[Row[Any]]:
    query: Select[Any] = select(blocks.c.id, blocks.c.state, blocks.c.node_class, _INDEX).where(
        blocks.c.ablation_id == ablation_id, blocks.c.state == BlockState.HELD
    )
    return list(connection.execute(query.order_by(blocks.c.id).with_for_update(key_share=True)))


def _is_due(connection: Connection, ablation_id: str, waiting: Sequence[Row[Any]], after: int) -> bool:
    """Lock the ablation; return whether it runs and the look after `after` blocks is due.

    A cancellation or another process may have been faster.
    """
    state = lock_ablation(connection, ablation_id)
    first = min((row.block_index for row in waiting), default=None)
    return state == AblationState.RUNNING and first == after
