"""What went wrong in an ablation, with where its log is: attempts that broke, and trials that did not measure."""

from typing import Any

from sqlalchemy import Connection, Row, func, select

from experiments.outcomes import AttemptState, Outcome
from service.store.tables import attempts, blocks, log_chunks, nodes, receipts, trials

_INDEX = blocks.c["index"].label("block_index")
_BROKEN = (AttemptState.BROKEN, AttemptState.RELEASED, AttemptState.EXPIRED)
TAIL_BYTES = 2000
"""Of a log that is shown with a failure."""
_MOST_CHUNKS = 50


def broken_attempts(connection: Connection, ablation_id: str, *, limit: int) -> list[Row[Any]]:
    """Return the newest attempts that broke: their rows with the block's index and the node's name."""
    query = select(attempts, _INDEX, nodes.c.name.label("node")).select_from(attempts)
    query = query.join(blocks, blocks.c.id == attempts.c.block_id).join(nodes, nodes.c.id == attempts.c.node_id)
    query = query.where(attempts.c.ablation_id == ablation_id, attempts.c.state.in_(_BROKEN))
    return list(connection.execute(query.order_by(attempts.c.started_at.desc()).limit(limit)))


def unmeasured_trials(connection: Connection, ablation_id: str, *, limit: int) -> list[Row[Any]]:
    """Return the newest trials whose receipts hold no measurement, with the receipt's text and its attempt."""
    query = select(trials, receipts.c.payload, receipts.c.attempt_id, attempts.c.number.label("attempt_number"))
    query = query.join(receipts, receipts.c.trial_id == trials.c.id)
    query = query.join(attempts, attempts.c.id == receipts.c.attempt_id)
    query = query.where(trials.c.ablation_id == ablation_id, trials.c.outcome != Outcome.MEASURED)
    newest = query.order_by(trials.c.block_index.desc(), trials.c.position.desc())
    return list(connection.execute(newest.limit(limit)))


def count(connection: Connection, ablation_id: str) -> int:
    """Return how many attempts broke and trials did not measure."""
    broken = select(func.count()).where(attempts.c.ablation_id == ablation_id, attempts.c.state.in_(_BROKEN))
    mine = (trials.c.ablation_id == ablation_id, trials.c.outcome != Outcome.MEASURED)
    unmeasured = select(func.count()).select_from(trials).where(*mine)
    return int((connection.scalar(broken) or 0) + (connection.scalar(unmeasured) or 0))


def tail_of_attempt(connection: Connection, attempt: Row[Any]) -> str:
    """Return the end of the log of the trial that broke an attempt; of the last that ran where none is named."""
    query = select(trials.c.id, trials.c.arm).where(trials.c.block_id == attempt.block_id)
    rows = connection.execute(query.order_by(trials.c.position.desc())).all()
    named = [row.id for row in rows if row.arm == attempt.arm] or [row.id for row in rows]
    tails = (tail(connection, trial_id, attempt.id) for trial_id in named)
    return next((found for found in tails if found), "")


def tail(connection: Connection, trial_id: str, attempt_id: str) -> str:
    """Return the end of the log that an attempt left of a trial, whole lines; empty where there is none."""
    own = (log_chunks.c.trial_id == trial_id, log_chunks.c.attempt_id == attempt_id)
    query = select(log_chunks.c.data).where(*own).order_by(log_chunks.c.end_offset.desc())
    found: bytes = b""
    for data in connection.execute(query.limit(_MOST_CHUNKS)).scalars():
        found = bytes(data) + found
        if len(found) > TAIL_BYTES:
            return found[-TAIL_BYTES:].partition(b"\n")[2].decode("utf-8", "replace")
    return found.decode("utf-8", "replace")
