"""Single blocks, and several of them that will not run."""

from collections.abc import Sequence

from sqlalchemy import Connection, select

from service.lifecycle import BlockState, TrialState
from service.store.columns import db_now
from service.store.tables import attempts, blocks, trials
from service.store.transitions import Journal


def block_state(connection: Connection, attempt_id: str) -> tuple[str, str]:
    """Return (block id, its state) of an attempt's block."""
    query = select(blocks.c.id, blocks.c.state).join(attempts, attempts.c.block_id == blocks.c.id)
    row = connection.execute(query.where(attempts.c.id == attempt_id)).one()
    return row.id, row.state


def cancel_blocks(
    connection: Connection, journal: Journal, ablation_id: str, block_ids: Sequence[str], *, reason: str
) -> None:
    """Cancel queued blocks of an ablation, which the caller has locked, with their trials."""
    if not block_ids:
        return
    ended = {"finished_at": db_now()}
    journal.move("block", block_ids, BlockState.QUEUED, BlockState.CANCELLED, reason=reason, message=reason, **ended)
    cancelled = select(blocks.c.id).where(blocks.c.ablation_id == ablation_id, blocks.c.state == BlockState.CANCELLED)
    waiting = select(trials.c.id).where(trials.c.block_id.in_(cancelled), trials.c.state == TrialState.QUEUED)
    trial_ids = list(connection.execute(waiting).scalars())
    journal.move("trial", trial_ids, TrialState.QUEUED, TrialState.CANCELLED, reason=reason)
