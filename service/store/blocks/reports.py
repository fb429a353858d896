"""A report: the receipts of a whole block are stored, and its trials, the block and the attempt move to done, at once.

Follows `attempts` and leads to `completion`. A result that comes after its lease ran out still counts as long as no
other attempt has claimed the block; after that it changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, bindparam, insert, update

from ablate.experiments.outcomes import AttemptState, BlockState, TrialState
from ablate.experiments.records.identity import BlockReport
from ablate.experiments.reporting import wording
from ablate.service.errors import StaleToken
from ablate.service.lifecycle import REPORTED
from ablate.service.store.blocks.attempts import (
    AttemptFailure,
    LockedAttempt,
    block_of,
    check_holder,
    check_token,
    end_moment,
    end_without_result,
    find_attempt,
    forget_progress,
    has_token,
    lock_attempt,
    lock_block,
)
from ablate.service.store.blocks.completion import complete_if_done
from ablate.service.store.blocks.transitions import Transitions
from ablate.service.store.tables import attempts, db_now, receipts, storable, trials


@dataclass(frozen=True, kw_only=True)
class VerifiedReceipt:
    """A receipt whose digest, numbers and ids were checked."""

    trial_id: str
    outcome: str
    failure: str | None
    """Class and message of a trial without a measurement."""
    arm_digest: str
    wall_s: float
    digest: str
    payload: str
    """Canonical JSON."""


def was_reported(connection: Connection, attempt_id: str, token: str, report_digest: str) -> bool:
    """Return whether exactly this report is stored. Raises NotFound."""
    attempt = find_attempt(connection, attempt_id)
    return bool(attempt.report_digest == report_digest) and has_token(attempt, token)


def check_wanted(connection: Connection, attempt_id: str, token: str, *, has_result: bool) -> None:
    """Raise StaleToken unless a report of this attempt would count now.

    Spares the work of verifying a stale report, which `lock_wanted` rejects in any case. The connection must see one
    moment, as that of `Store.read` does: the lease may end between the two reads.
    """
    attempt = find_attempt(connection, attempt_id)
    block = block_of(connection, attempt)
    if not (has_result and _is_unclaimed(attempt, block)):
        check_holder(attempt, block)
    check_token(attempt, token)


def lock_wanted(connection: Connection, attempt_id: str, token: str) -> LockedAttempt:
    """Lock the block of an attempt for its result, and give the block back to an expired attempt. Raises StaleToken."""
    locked = lock_block(connection, attempt_id)
    if _is_unclaimed(locked.attempt, locked.block):
        _take_back(connection, locked.attempt, locked.block)
    return lock_attempt(connection, attempt_id, token)


def _is_unclaimed(attempt: Row[Any], block: Row[Any]) -> bool:
    """Return whether an attempt's lease ran out and no other attempt has claimed the block since."""
    newest = bool(block.state == BlockState.QUEUED and block.attempt_no == attempt.number)
    return newest and bool(attempt.state == AttemptState.EXPIRED)


def _take_back(connection: Connection, attempt: Row[Any], block: Row[Any]) -> None:
    transitions = Transitions(connection, block.ablation_id, actor=attempt.node_id)
    lease = {"attempt_id": attempt.id, "node_id": attempt.node_id, "lease_until": db_now()}
    reason = f"the result of attempt {attempt.number} came late; nobody else has claimed the block"
    transitions.move([block.id], BlockState.QUEUED, BlockState.RUNNING, reason=reason, **lease)
    transitions.flush()
    no_failure = {"failure_class": None, "message": None, "arm": None}
    connection.execute(update(attempts).where(attempts.c.id == attempt.id).values(**no_failure))


def store_block(
    connection: Connection,
    locked: LockedAttempt,
    verified: Sequence[VerifiedReceipt],
    *,
    report_digest: str,
    differences: str = "",
) -> BlockState:
    """Store a whole block's receipts and move trials, attempt and block to done; return the block's state.

    `differences` from the baseline belong to the block's event.
    """
    block = locked.block
    if len(verified) != len(locked.trials):
        raise StaleToken(f"block {block.id} has {len(locked.trials)} trials, the report {len(verified)} receipts")
    _insert_receipts(connection, locked, verified)
    transitions = Transitions(connection, block.ablation_id, actor=locked.attempt.node_id)
    failures = {item.trial_id: item.failure for item in verified if item.failure is not None}
    for row in locked.trials:
        transitions.move([row.id], TrialState(row.state), TrialState.DONE, reason=failures.get(row.id, REPORTED))
    ended_at = locked.attempt.ended_at  # of a late result, or of an imported attempt, which has no lease
    if ended_at is None:
        ended_at = end_moment(block.lease_until, locked.attempt.started_at)
    ended = {"ended_at": ended_at, "report_digest": report_digest}
    before = AttemptState(locked.attempt.state)
    transitions.move([locked.attempt.id], before, AttemptState.DONE, reason=REPORTED, **ended)
    values = {"lease_until": None, "limit_at": None, "finished_at": db_now(), "message": None}
    reason = storable("; ".join(part for part in (_failed(locked.trials, failures), differences) if part) or REPORTED)
    transitions.move([block.id], BlockState.RUNNING, BlockState.DONE, reason=reason, **values)
    transitions.flush()
    forget_progress(connection, locked)
    complete_if_done(connection, block.ablation_id)
    return BlockState.DONE


def _failed(block: Sequence[Row[Any]], failures: Mapping[str, str]) -> str:
    """Return how many trials were measured and which arms failed; empty if none did."""
    failed = [row.arm for row in block if row.id in failures]
    if not failed:
        return ""
    number = len(block) - len(failed)
    return f"{number or 'none'} of {len(block)} trials measured; {wording.listed(failed)} failed"


def _insert_receipts(connection: Connection, locked: LockedAttempt, verified: Sequence[VerifiedReceipt]) -> None:
    own = {"ablation_id": locked.block.ablation_id, "attempt_id": locked.attempt.id}
    rows = [
        own | {name: value for name, value in vars(item).items() if name not in {"outcome", "failure"}}
        for item in verified
    ]
    connection.execute(insert(receipts), rows)
    of_trial = update(trials).where(trials.c.id == bindparam("trial"))
    connection.execute(
        of_trial.values(outcome=bindparam("measured"), receipt_digest=bindparam("receipt")),
        [{"trial": item.trial_id, "measured": item.outcome, "receipt": item.digest} for item in verified],
    )


def store_break(
    connection: Connection, locked: LockedAttempt, report: BlockReport, *, report_digest: str
) -> BlockState:
    """Store why a block broke; return its state. Its receipts are discarded: a block counts whole or not at all."""
    failure = report.failure_class
    if failure is None:
        raise ValueError("the report names no failure class; allowed: one of the closed list")
    message = report.message or "no reason given"
    if report.receipts:
        message += f" ({len(report.receipts)} receipts of the broken block were discarded)"
    broke = AttemptFailure(failure_class=failure, message=message, arm=report.arm)
    state = end_without_result(connection, locked, AttemptState.BROKEN, broke, actor=locked.attempt.node_id)
    connection.execute(update(attempts).where(attempts.c.id == locked.attempt.id).values(report_digest=report_digest))
    return state
