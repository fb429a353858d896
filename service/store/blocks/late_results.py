"""A result that comes after its lease ran out: it counts as long as nobody else has claimed the block.

A whole block was measured, its receipts name the attempt, and the block would only be measured again. As soon as
somebody else has claimed it, or it is over, the late one changes nothing.
"""

from types import SimpleNamespace
from typing import Any

from sqlalchemy import Connection, Row, select, update

from experiments.outcomes import AttemptState, BlockState
from service.store.blocks.attempts import (
    LockedAttempt,
    check_holds,
    check_token,
    find_attempt,
    held,
    lock_attempt,
    lock_block,
    shows_token,
)
from service.store.blocks.transitions import Transitions
from service.store.columns import db_now
from service.store.tables import attempts, blocks


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
