"""How an ablation ends: by its last block, a look, a spent budget or a cancellation; and what is asked for then."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, func, select, update

from experiments.outcomes import AblationState, BlockState, TrialState
from experiments.retries import budget_spent
from service.lifecycle import OVER, OutboxKind
from service.store import outbox
from service.store.columns import db_now
from service.store.tables import ablations, attempts, blocks, trials
from service.store.transitions import Transitions, lock_ablation


def complete_if_done(connection: Connection, ablation_id: str) -> None:
    """Count the ablation's blocks again and move it on when none is left to run."""
    state = lock_ablation(connection, ablation_id)
    if state in OVER:
        return
    _stop_when_spent(connection, ablation_id)
    counts = _count(connection, ablation_id)
    planned = sum(counts.values())
    done, failed, cancelled = (counts.get(s, 0) for s in (BlockState.DONE, BlockState.FAILED, BlockState.CANCELLED))
    finished_trials = select(func.count()).where(trials.c.ablation_id == ablation_id, trials.c.state == TrialState.DONE)
    connection.execute(
        update(ablations)
        .where(ablations.c.id == ablation_id)
        .values(
            blocks_done=done,
            blocks_failed=failed,
            blocks_cancelled=cancelled,
            trials_done=finished_trials.scalar_subquery(),
        )
    )
    if done + failed + cancelled == planned:
        _end(connection, ablation_id, state, done=done, failed=failed, cancelled=cancelled)
    elif done + failed + cancelled + counts.get(BlockState.HELD, 0) == planned:
        outbox.add(connection, OutboxKind.LOOK, ablation_id)


def _stop_when_spent(connection: Connection, ablation_id: str) -> None:
    """Cancel the blocks that still wait once the attempts, broken ones included, have used the device minutes up.

    A block that is being claimed at this moment is skipped instead of waited for: locks are taken on blocks first.
    """
    spent = select(func.sum(attempts.c.ended_at - attempts.c.started_at) / 60)
    spent = spent.join(blocks, blocks.c.id == attempts.c.block_id).where(blocks.c.ablation_id == ablation_id)
    query = select(ablations.c.device_minutes, func.coalesce(spent.scalar_subquery(), 0.0).label("used"))
    budget, used = connection.execute(query.where(ablations.c.id == ablation_id)).one()
    reason = budget_spent(used, budget)
    if reason is None:
        return
    transitions = Transitions(connection, ablation_id, actor="service")
    cancel_blocks(
        connection, transitions, ablation_id, lock_waiting(connection, ablation_id, wait=False), reason=reason
    )
    transitions.flush()


def lock_waiting(connection: Connection, ablation_id: str, *, wait: bool) -> list[Row[Any]]:
    """Lock the blocks that are queued or held, by id; those that somebody else has locked are skipped unless `wait`."""
    waiting = blocks.c.state.in_([BlockState.QUEUED, BlockState.HELD])
    query = select(blocks.c.id, blocks.c.state).where(blocks.c.ablation_id == ablation_id, waiting)
    return list(connection.execute(query.order_by(blocks.c.id).with_for_update(skip_locked=not wait)))


def _count(connection: Connection, ablation_id: str) -> dict[str, int]:
    query = select(blocks.c.state, func.count()).where(blocks.c.ablation_id == ablation_id).group_by(blocks.c.state)
    return {row[0]: row[1] for row in connection.execute(query)}


def _end(
    connection: Connection, ablation_id: str, old: AblationState, *, done: int, failed: int, cancelled: int
) -> None:
    if old == AblationState.CANCELLING and failed + cancelled:
        new, reason, next_kind = AblationState.CANCELLED, "no block is running any more", OutboxKind.REPORT
    elif done:
        left = f", {cancelled} not run" if cancelled else ""
        new, reason, next_kind = AblationState.COMPLETED, f"{done} blocks done, {failed} failed{left}", OutboxKind.JUDGE
    else:
        new, reason, next_kind = AblationState.FAILED, f"no block counted, {failed} failed", OutboxKind.JUDGE
    transitions = Transitions(connection, ablation_id, actor="service")
    transitions.move([ablation_id], old, new, reason=reason, finished_at=db_now())
    transitions.flush()
    rank = outbox.Rank.LATER if new == AblationState.CANCELLED else outbox.Rank.FIRST
    outbox.add(connection, next_kind, ablation_id, rank=rank)


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
