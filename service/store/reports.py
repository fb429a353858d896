"""A finished block: its receipts stored and its states moved in one transaction, once."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, delete, insert, update

from experiments.records.messages import BlockReport
from service.errors import StaleToken
from service.lifecycle import AttemptState, BlockState, TrialState
from service.store.attempts import Held, break_off, find_attempt
from service.store.columns import db_now
from service.store.completion import settle
from service.store.tables import attempts, events, receipts, trials
from service.store.transitions import Journal


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


def was_reported(connection: Connection, attempt_id: str, token: int, report_digest: str) -> bool:
    """Tell whether exactly this report was already stored. Raises NotFound."""
    attempt = find_attempt(connection, attempt_id)
    return bool(attempt.token == token and attempt.report_digest == report_digest)


def store_block(connection: Connection, held: Held, verified: Sequence[VerifiedReceipt], *, report_digest: str) -> None:
    """Store a whole block's receipts and move trials, block and attempt to done."""
    block = held.block
    if len(verified) != len(held.trials):
        raise StaleToken(f"block {block.id} has {len(held.trials)} trials, the report {len(verified)} receipts")
    connection.execute(
        insert(receipts),
        [{"ablation_id": block.ablation_id, "attempt_id": held.attempt.id, **_columns(item)} for item in verified],
    )
    journal = Journal(connection, block.ablation_id, actor=held.attempt.node_id)
    for state in (TrialState.QUEUED, TrialState.RUNNING):
        ids = [row.id for row in held.trials if row.state == state]
        journal.move("trial", ids, state, TrialState.DONE, reason="reported")
    connection.execute(
        update(trials)
        .where(trials.c.id == bindparam("b_id"))
        .values(outcome=bindparam("b_outcome"), receipt_digest=bindparam("b_digest")),
        [{"b_id": item.trial_id, "b_outcome": item.outcome, "b_digest": item.digest} for item in verified],
    )
    ending = {"ended_at": db_now(), "report_digest": report_digest}
    journal.move("attempt", [held.attempt.id], AttemptState.RUNNING, AttemptState.DONE, reason="reported", **ending)
    journal.move(
        "block",
        [block.id],
        BlockState.RUNNING,
        BlockState.DONE,
        reason="reported",
        lease_until=None,
        finished_at=db_now(),
        message=None,
    )
    journal.flush()
    _forget_progress(connection, held)
    settle(connection, block.ablation_id)


def store_break(connection: Connection, held: Held, report: BlockReport, *, report_digest: str) -> None:
    """Store why a block broke; receipts that came along are discarded with it, because a block is never patched."""
    failure = report.failure_class
    if failure is None:
        raise ValueError("the report names no failure class; allowed: one of the closed list")
    message = report.message or "no reason given"
    if report.receipts:
        message += f" ({len(report.receipts)} receipts of the broken block were discarded)"
    break_off(connection, held, AttemptState.BROKEN, failure=failure, message=message, actor=held.attempt.node_id)
    connection.execute(update(attempts).where(attempts.c.id == held.attempt.id).values(report_digest=report_digest))


def _columns(item: VerifiedReceipt) -> dict[str, object]:
    return {
        "trial_id": item.trial_id,
        "arm_digest": item.arm_digest,
        "wall_s": item.wall_s,
        "digest": item.digest,
        "payload": item.payload,
    }


def _forget_progress(connection: Connection, held: Held) -> None:
    ids = [row.id for row in held.trials]
    connection.execute(delete(events).where(events.c.subject.in_(ids), events.c.kind == "trial.progress"))
