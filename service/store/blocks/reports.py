"""A finished block: its receipts stored and its states moved in one transaction, once."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from sqlalchemy import Connection, Row, bindparam, delete, func, insert, select, update

from experiments.outcomes import AttemptState, BlockState, TrialState
from experiments.records.messages import BlockReport
from service.errors import StaleToken
from service.lifecycle import EventKind
from service.store.blocks.attempts import (
    AttemptFailure,
    LockedAttempt,
    check_holds,
    check_token,
    end_without_result,
    find_attempt,
    held,
    lock_attempt,
    lock_block,
    shows_token,
)
from service.store.blocks.completion import complete_if_done
from service.store.blocks.transitions import Transitions
from service.store.columns import db_now
from service.store.tables import attempts, blocks, events, receipts, trials


def check_wanted(connection: Connection, attempt_id: str, token: str) -> None:
    """Raise StaleToken unless the attempt holds its block, or its result may still be taken."""
    attempt = find_attempt(connection, attempt_id)
    block = connection.execute(select(blocks).where(blocks.c.id == attempt.block_id)).one()
    if not (_nobody_since(attempt, block) and shows_token(attempt, token)):
        check_holds(connection, attempt_id, token)


def _nobody_since(attempt: Row[Any] | SimpleNamespace, block: Row[Any] | SimpleNamespace) -> bool:
    """Tell whether an attempt's lease ran out and its block waits: nobody has claimed it since."""
    last = bool(block.state == BlockState.QUEUED and block.attempt_no == attempt.number)
    return last and bool(attempt.state == AttemptState.EXPIRED)


def lock_wanted(connection: Connection, attempt_id: str, token: str) -> LockedAttempt:
    """Lock the block of an attempt for its result, and give it back to an attempt that expired. Raises StaleToken."""
    locked = lock_block(connection, attempt_id)
    attempt, block = locked.attempt, locked.block
    if not _nobody_since(attempt, block):
        return held(locked, token)
    check_token(attempt, token)
    transitions = Transitions(connection, block.ablation_id, actor=attempt.node_id)
    lease = {"attempt_id": attempt_id, "node_id": attempt.node_id, "lease_until": db_now()}
    reason = f"the result of attempt {attempt.number} came late; nobody else has claimed the block"
    transitions.move([block.id], BlockState.QUEUED, BlockState.RUNNING, reason=reason, **lease)
    transitions.flush()
    forgiven = {"failure_class": None, "message": None, "arm": None}
    connection.execute(update(attempts).where(attempts.c.id == attempt_id).values(**forgiven))
    return lock_attempt(connection, attempt_id, token)


@dataclass(frozen=True, kw_only=True)
class VerifiedReceipt:
    """A receipt whose digest, numbers and ids were checked."""

    trial_id: str
    outcome: str
    arm_digest: str
    wall_s: float
    digest: str
    payload: str
    """Canonical JSON."""


def was_reported(connection: Connection, attempt_id: str, token: str, report_digest: str) -> bool:
    """Tell whether exactly this report was already stored. Raises NotFound."""
    attempt = find_attempt(connection, attempt_id)
    return bool(attempt.report_digest == report_digest) and shows_token(attempt, token)


def store_block(
    connection: Connection, locked: LockedAttempt, verified: Sequence[VerifiedReceipt], *, report_digest: str
) -> None:
    """Store a whole block's receipts and move trials, block and attempt to done."""
    block = locked.block
    if len(verified) != len(locked.trials):
        raise StaleToken(f"block {block.id} has {len(locked.trials)} trials, the report {len(verified)} receipts")
    connection.execute(
        insert(receipts),
        [{"ablation_id": block.ablation_id, "attempt_id": locked.attempt.id, **_columns(item)} for item in verified],
    )
    transitions = Transitions(connection, block.ablation_id, actor=locked.attempt.node_id)
    for state in (TrialState.QUEUED, TrialState.RUNNING):
        ids = [row.id for row in locked.trials if row.state == state]
        transitions.move(ids, state, TrialState.DONE, reason="reported")
    connection.execute(
        update(trials)
        .where(trials.c.id == bindparam("b_id"))
        .values(outcome=bindparam("b_outcome"), receipt_digest=bindparam("b_digest")),
        [{"b_id": item.trial_id, "b_outcome": item.outcome, "b_digest": item.digest} for item in verified],
    )
    ending = {"ended_at": func.coalesce(attempts.c.ended_at, db_now()), "report_digest": report_digest}
    was = AttemptState(locked.attempt.state)
    transitions.move([locked.attempt.id], was, AttemptState.DONE, reason="reported", **ending)
    transitions.move(
        [block.id],
        BlockState.RUNNING,
        BlockState.DONE,
        reason="reported",
        lease_until=None,
        limit_at=None,
        finished_at=db_now(),
        message=None,
    )
    counters = transitions.flush()
    _forget_progress(connection, locked)
    complete_if_done(connection, block.ablation_id, counters)


def store_break(connection: Connection, locked: LockedAttempt, report: BlockReport, *, report_digest: str) -> None:
    """Store why a block broke; receipts that came along are discarded with it, because a block is never patched."""
    failure = report.failure_class
    if failure is None:
        raise ValueError("the report names no failure class; allowed: one of the closed list")
    message = report.message or "no reason given"
    if report.receipts:
        message += f" ({len(report.receipts)} receipts of the broken block were discarded)"
    broke = AttemptFailure(failure_class=failure, message=message, arm=report.arm)
    end_without_result(connection, locked, AttemptState.BROKEN, broke, actor=locked.attempt.node_id)
    connection.execute(update(attempts).where(attempts.c.id == locked.attempt.id).values(report_digest=report_digest))


def _columns(item: VerifiedReceipt) -> dict[str, object]:
    return {
        "trial_id": item.trial_id,
        "arm_digest": item.arm_digest,
        "wall_s": item.wall_s,
        "digest": item.digest,
        "payload": item.payload,
    }


def _forget_progress(connection: Connection, locked: LockedAttempt) -> None:
    ids = [row.id for row in locked.trials]
    connection.execute(delete(events).where(events.c.subject.in_(ids), events.c.kind == EventKind.TRIAL_PROGRESS))
