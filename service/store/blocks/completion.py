"""How an ablation ends: by its last block, a look, a spent budget or a cancellation; and what is asked for then."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import BindParameter, Connection, Row, bindparam, select

from experiments.outcomes import AblationState, BlockState, TrialState
from experiments.retries import budget_spent
from service.lifecycle import OVER, OutboxKind
from service.store import outbox
from service.store.blocks.counters import counters
from service.store.blocks.ended_words import ended_words, failed_words
from service.store.blocks.transitions import Transitions
from service.store.columns import db_now
from service.store.tables import ablations, blocks, trials

_ID: BindParameter[str] = bindparam("ablation", type_=ablations.c.id.type)
_LOCK = select(*counters(_ID)).where(ablations.c.id == _ID).with_for_update()

NOT_SHOWN: dict[str, None] = {"mlflow_experiment_id": None, "mlflow_run_id": None}
"""Columns of an ablation of which MLflow shows nothing, or not all that there is."""


def complete_if_done(connection: Connection, ablation_id: str, row: Row[Any] | None = None) -> None:
    """Move the ablation on when none of its blocks is left to run.

    Until then it costs the same however many blocks there are.

    `row` are its counters, where the caller has locked it and knows them.
    """
    row = row or _locked(connection, ablation_id)
    if row.state in OVER:
        return
    if _stop_when_spent(connection, row):
        row = _locked(connection, ablation_id)
    if row.blocks_queued + row.blocks_running == 0:
        if row.blocks_held == 0:
            _end(connection, row)
        else:
            outbox.add(connection, OutboxKind.LOOK, ablation_id)


def _locked(connection: Connection, ablation_id: str) -> Row[Any]:
    """Lock an ablation; return its state, its counters and what it may use."""
    return connection.execute(_LOCK, {"ablation": ablation_id}).one()


def _stop_when_spent(connection: Connection, row: Row[Any]) -> bool:
    """Cancel the blocks that still wait once the attempts, broken ones included, have used the device minutes up.

    A block that is being claimed at this moment is skipped instead of waited for: locks are taken on blocks first.
    Return whether they are used up while blocks wait.
    """
    reason = budget_spent(row.devices * row.device_s / 60, row.device_minutes)
    if reason is None or row.blocks_queued + row.blocks_held == 0:
        return False
    transitions = Transitions(connection, row.id, actor="service", locked=AblationState(row.state))
    waiting = lock_waiting(connection, row.id, wait=False)
    cancel_blocks(connection, transitions, row.id, waiting, reason=reason)
    transitions.flush()
    return True


def lock_waiting(connection: Connection, ablation_id: str, *, wait: bool) -> list[Row[Any]]:
    """Lock the blocks that are queued or held, by id; those that somebody else has locked are skipped unless `wait`."""
    waiting = blocks.c.state.in_([BlockState.QUEUED, BlockState.HELD])
    query = select(blocks.c.id, blocks.c.state).where(blocks.c.ablation_id == ablation_id, waiting)
    return list(connection.execute(query.order_by(blocks.c.id).with_for_update(skip_locked=not wait)))


def _end(connection: Connection, row: Row[Any]) -> None:
    old = AblationState(row.state)
    done, failed, cancelled = row.blocks_done, row.blocks_failed, row.blocks_cancelled
    if old == AblationState.CANCELLING and cancelled:
        new, reason, next_kind = AblationState.CANCELLED, "no block is running any more", OutboxKind.REPORT
    elif done:
        reason = ended_words(connection, row.id, done=done, failed=failed, cancelled=cancelled)
        new, next_kind = AblationState.COMPLETED, OutboxKind.JUDGE
    else:
        new, reason, next_kind = AblationState.FAILED, failed_words(connection, row.id), OutboxKind.JUDGE
    transitions = Transitions(connection, row.id, actor="service", locked=old)
    transitions.move([row.id], old, new, reason=reason, finished_at=db_now(), **NOT_SHOWN)
    transitions.flush()
    rank = outbox.Rank.LATER if new == AblationState.CANCELLED else outbox.Rank.FIRST
    outbox.add(connection, next_kind, row.id, rank=rank)


def cancel_blocks(
    connection: Connection, transitions: Transitions, ablation_id: str, waiting: Sequence[Row[Any]], *, reason: str
) -> None:
    """Cancel queued and held blocks of an ablation, which the caller has locked, with their trials."""
    if not waiting:
        return
    ended = {"finished_at": db_now(), "message": reason}
    for state in (BlockState.QUEUED, BlockState.HELD):
        ids = [row.id for row in waiting if row.state == state]
        transitions.move(ids, state, BlockState.CANCELLED, reason=reason, **ended)
    cancelled = select(blocks.c.id).where(blocks.c.ablation_id == ablation_id, blocks.c.state == BlockState.CANCELLED)
    unstarted = select(trials.c.id).where(trials.c.block_id.in_(cancelled), trials.c.state == TrialState.QUEUED)
    trial_ids = list(connection.execute(unstarted).scalars())
    transitions.move(trial_ids, TrialState.QUEUED, TrialState.CANCELLED, reason=reason)


def complete_cancelling(connection: Connection) -> int:
    """End ablations that are being cancelled and have no running block; return how many."""
    running = select(blocks.c.id).where(blocks.c.ablation_id == ablations.c.id, blocks.c.state == BlockState.RUNNING)
    stuck = select(ablations.c.id).where(ablations.c.state == AblationState.CANCELLING, ~running.exists())
    ids = list(connection.execute(stuck).scalars())
    for ablation_id in ids:
        complete_if_done(connection, ablation_id)
    return len(ids)
