"""How an ablation ends: by its last block, a look, a spent budget or a cancellation; and what is asked for then."""

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import BindParameter, Connection, Row, Select, bindparam, func, select

from experiments.outcomes import BASELINE, VARIANT, AblationState, BlockState, Outcome, TrialState
from experiments.reporting import wording
from experiments.retries import budget_spent
from service.lifecycle import OVER, OutboxKind
from service.store import outbox
from service.store.blocks.transitions import Transitions, counters
from service.store.columns import db_now
from service.store.tables import ablations, blocks, receipts, trials

_NAMED = 3
"""Arms that are named, each with an outcome."""
_LONGEST = 200
"""Characters of a reason."""
_WORDS_ID: BindParameter[str] = bindparam("ablation", type_=trials.c.ablation_id.type)
_OF_ABLATION = (trials.c.ablation_id == _WORDS_ID, trials.c.outcome.is_not(None))
_ARM = (trials.c.role, trials.c.arm, trials.c.outcome)
_OUTCOMES = select(*_ARM, func.count().label("trials")).where(*_OF_ABLATION).group_by(*_ARM)
_FIRST = (
    select(receipts.c.payload)
    .join(trials, trials.c.id == receipts.c.trial_id)
    .where(*_OF_ABLATION, trials.c.outcome != Outcome.MEASURED)
    .order_by(trials.c.block_index, trials.c.position)
    .limit(1)
)
_FAILED = (
    select(blocks.c.message, func.count().over().label("blocks"))
    .where(blocks.c.ablation_id == _WORDS_ID, blocks.c.state == BlockState.FAILED)
    .order_by(blocks.c["index"])
    .limit(1)
)
"""The first of the failed blocks, and how many there are."""


def _comparable() -> Select[Any]:
    other = trials.alias("other")
    measured = (trials.c.role == VARIANT, trials.c.outcome == Outcome.MEASURED)
    beside = (other.c.block_id == trials.c.block_id, other.c.role == BASELINE, other.c.outcome == Outcome.MEASURED)
    own = select(func.count(trials.c.block_index.distinct())).where(trials.c.ablation_id == _WORDS_ID, *measured)
    return own.where(select(other.c.id).where(*beside).exists())


_COMPARABLE = _comparable()


def ended_words(connection: Connection, ablation_id: str, *, done: int, failed: int, cancelled: int) -> str:
    """Return for example "6 blocks done, 0 failed", and why trials of them are no measurements where some are not.

    Looks at every trial, once in the life of an ablation.
    """
    found = connection.execute(_OUTCOMES, {"ablation": ablation_id}).all()
    without = sorted((row for row in found if row.outcome != Outcome.MEASURED), key=_baseline_first)
    few = _few(connection, ablation_id, done) if without else []
    left = [f"{cancelled:,} not run"] if cancelled else []
    counts = ", ".join([f"{wording.counted(done, 'block')} done", *few, f"{failed:,} failed", *left])
    return f"{counts}: {_why(connection, ablation_id, without)}" if without else counts


def failed_words(connection: Connection, ablation_id: str) -> str:
    """Return for example "no block counted, 6 failed; the first: ..." with the reason that ended its first block."""
    found = connection.execute(_FAILED, {"ablation": ablation_id}).first()
    first = f"; the first: {wording.shorten(found.message, _LONGEST)}" if found and found.message else ""
    return f"no block counted, {found.blocks if found else 0:,} failed{first}"


def _baseline_first(row: Row[Any]) -> tuple[bool, str, str]:
    return row.role != BASELINE, row.arm, row.outcome


def _few(connection: Connection, ablation_id: str, done: int) -> list[str]:
    """Say in how many blocks the baseline and a variant measured, unless they did in all."""
    number = connection.execute(_COMPARABLE, {"ablation": ablation_id}).scalar_one()
    return [] if number == done else [f"{f'{number:,}' if number else 'none'} of them comparable"]


def _why(connection: Connection, ablation_id: str, without: list[Row[Any]]) -> str:
    """Say which arms did not measure, and why the first trial did not."""
    named = [f"{row.arm} {row.outcome} in {row.trials:,}" for row in without[:_NAMED]]
    more = [f"{len(without) - _NAMED} more"] if len(without) > _NAMED else []
    message = json.loads(connection.execute(_FIRST, {"ablation": ablation_id}).scalar_one())["message"]
    first = f"; the first: {wording.shorten(message, _LONGEST)}" if message else ""
    return wording.listed([*named, *more]) + first


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
