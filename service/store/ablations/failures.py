"""Failures of an ablation, with the ends of their logs: broken attempts, and trials without a measurement."""

from typing import Any

from sqlalchemy import Connection, Row, func, select

from experiments.outcomes import Outcome
from service.store.blocks.attempts import WITHOUT_RESULT
from service.store.tables import attempts, blocks, log_chunks, nodes, receipts, trials

_INDEX = blocks.c["index"].label("block_index")
TAIL_BYTES = 2000
"""Bytes of the log that are shown with a failure."""
_MOST_CHUNKS = 50


def broken_attempts(connection: Connection, ablation_id: str, *, limit: int) -> list[Row[Any]]:
    """Return the newest attempts that ended without a result, with `block_index` and the name of the `node`."""
    query = select(attempts, _INDEX, nodes.c.name.label("node")).select_from(attempts)
    query = query.join(blocks, blocks.c.id == attempts.c.block_id).join(nodes, nodes.c.id == attempts.c.node_id)
    query = query.where(attempts.c.ablation_id == ablation_id, attempts.c.state.in_(WITHOUT_RESULT))
    return list(connection.execute(query.order_by(attempts.c.started_at.desc()).limit(limit)))


def unmeasured_trials(connection: Connection, ablation_id: str, *, limit: int) -> list[Row[Any]]:
    """Return the newest trials whose receipts have no measurement, with the receipt's payload and attempt."""
    query = select(trials, receipts.c.payload, receipts.c.attempt_id, attempts.c.number.label("attempt_number"))
    query = query.join(receipts, receipts.c.trial_id == trials.c.id)
    query = query.join(attempts, attempts.c.id == receipts.c.attempt_id)
    query = query.where(trials.c.ablation_id == ablation_id, trials.c.outcome != Outcome.MEASURED)
    newest = query.order_by(trials.c.block_index.desc(), trials.c.position.desc())
    return list(connection.execute(newest.limit(limit)))


def count(connection: Connection, ablation_id: str) -> int:
    """Return the number of broken attempts and of trials without a measurement."""
    broken = select(func.count()).where(attempts.c.ablation_id == ablation_id, attempts.c.state.in_(WITHOUT_RESULT))
    mine = (trials.c.ablation_id == ablation_id, trials.c.outcome != Outcome.MEASURED)
    unmeasured = select(func.count()).select_from(trials).where(*mine)
    return int((connection.scalar(broken) or 0) + (connection.scalar(unmeasured) or 0))


def tail_of_attempt(connection: Connection, attempt: Row[Any]) -> str:
    """Return the end of the log of the trial that broke an attempt, or of the last trial with a log."""
    query = select(trials.c.id, trials.c.arm).where(trials.c.block_id == attempt.block_id)
    rows = connection.execute(query.order_by(trials.c.position.desc())).all()
    named = [row.id for row in rows if row.arm == attempt.arm] or [row.id for row in rows]
    tails = (tail(connection, trial_id, attempt.id) for trial_id in named)
    return next((text for text in tails if text), "")


def tail(connection: Connection, trial_id: str, attempt_id: str) -> str:
    """Return the last whole lines of an attempt's log of a trial; empty if there is none."""
    own = (log_chunks.c.trial_id == trial_id, log_chunks.c.attempt_id == attempt_id)
    query = select(log_chunks.c.data).where(*own).order_by(log_chunks.c.end_offset.desc())
    end = b""
    for data in connection.execute(query.limit(_MOST_CHUNKS)).scalars():
        end = bytes(data) + end
        if len(end) > TAIL_BYTES:
            return end[-TAIL_BYTES:].partition(b"\n")[2].decode("utf-8", "replace")
    return end.decode("utf-8", "replace")
