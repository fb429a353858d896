"""End an ablation when its last block ended or its budget is spent, and ask for what follows from that."""

from sqlalchemy import Connection, func, select, update

from experiments.retries import budget_spent
from service.lifecycle import OVER, AblationState, BlockState, TrialState
from service.store import outbox
from service.store.blocks import cancel_blocks
from service.store.columns import db_now
from service.store.tables import ablations, attempts, blocks, trials
from service.store.transitions import Journal, lock_ablation


def settle(connection: Connection, ablation_id: str) -> None:
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
        _end(connection, ablation_id, AblationState(state), done=done, failed=failed, cancelled=cancelled)


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
    waiting = select(blocks.c.id).where(blocks.c.ablation_id == ablation_id, blocks.c.state == BlockState.QUEUED)
    ids = list(connection.execute(waiting.with_for_update(skip_locked=True)).scalars())
    journal = Journal(connection, ablation_id, actor="service")
    cancel_blocks(connection, journal, ablation_id, ids, reason=reason)
    journal.flush()


def _count(connection: Connection, ablation_id: str) -> dict[str, int]:
    query = select(blocks.c.state, func.count()).where(blocks.c.ablation_id == ablation_id).group_by(blocks.c.state)
    return {row[0]: row[1] for row in connection.execute(query)}


def _end(
    connection: Connection, ablation_id: str, old: AblationState, *, done: int, failed: int, cancelled: int
) -> None:
    if old == AblationState.CANCELLING:
        new, reason, errand = AblationState.CANCELLED, "no block is running any more", outbox.REPORT
    elif done:
        left = f", {cancelled} not run" if cancelled else ""
        new, reason, errand = AblationState.COMPLETED, f"{done} blocks done, {failed} failed{left}", outbox.JUDGE
    else:
        new, reason, errand = AblationState.FAILED, f"no block counted, {failed} failed", outbox.JUDGE
    journal = Journal(connection, ablation_id, actor="service")
    journal.move("ablation", [ablation_id], old, new, reason=reason, finished_at=db_now())
    journal.flush()
    outbox.add(connection, errand, ablation_id)
