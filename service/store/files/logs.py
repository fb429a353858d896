"""Logs of trials: bytes at absolute offsets, stored by attempt, and dropped after ABLATE_LOG_DAYS.

Readers see the log of the newest attempt. Receipts, verdicts and events are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, ScalarSelect, delete, func, insert, select, update

from ablate.experiments.errors import SpecProblem
from ablate.experiments.records.messages import LogChunk
from ablate.service.errors import Invalid, NotFound
from ablate.service.lifecycle import TRIAL_OVER
from ablate.service.store.blocks.attempts import LockedAttempt
from ablate.service.store.tables import ablations, attempts, db_now, log_chunks, rfc3339, trials

PAGE_BYTES = 4 * 2**20
"""Most bytes in one response."""
TAIL_BYTES = 2000
"""Most bytes of the end of a log that a page shows."""
_TAIL_CHUNKS = 50

NEWEST_ATTEMPT = (
    select(attempts.c.id)
    .where(attempts.c.block_id == trials.c.block_id)
    .order_by(attempts.c.number.desc())
    .limit(1)
    .correlate(trials)
    .scalar_subquery()
)
"""the newest attempt at the block of a trial, in any state."""
_NUMBER = (
    select(func.coalesce(func.max(attempts.c.number), 0))
    .where(attempts.c.block_id == trials.c.block_id)
    .correlate(trials)
    .scalar_subquery()
)
"""The number of the newest attempt; 0 before the first."""


@dataclass(frozen=True, kw_only=True)
class LogPage:
    """A part of a log."""

    attempt: int
    """Number of the attempt that wrote the log; 0 before the first."""
    data: bytes
    end_offset: int
    """Absolute offset just after `data`."""
    complete: bool
    """Whether the trial is over and nothing follows."""


def append(connection: Connection, locked: LockedAttempt, chunks: Sequence[LogChunk]) -> None:
    """Store the bytes that are not stored yet. Raises Invalid if the log would have a gap."""
    if not chunks:
        return
    trial_ids = {row.id for row in locked.trials}
    for number, chunk in enumerate(chunks):
        if chunk.trial_id not in trial_ids:
            raise Invalid(f"trial {chunk.trial_id!r} is not part of block {locked.block.id}")
        _append_one(connection, locked.attempt.id, chunk, number)


def _append_one(connection: Connection, attempt_id: str, chunk: LogChunk, number: int) -> None:
    key = (log_chunks.c.trial_id == chunk.trial_id, log_chunks.c.attempt_id == attempt_id)
    stored = connection.execute(select(func.coalesce(func.max(log_chunks.c.end_offset), 0)).where(*key)).scalar_one()
    data = chunk.text.encode()
    if chunk.offset > stored:
        detail = f"begins at byte {chunk.offset}, but the stored log ends at byte {stored}"
        problem = SpecProblem(pointer=f"#/logs/{number}/offset", detail=detail, hint=f"send the log from byte {stored}")
        raise Invalid(problems=[problem])
    fresh = data[stored - chunk.offset :]
    if fresh:
        connection.execute(
            insert(log_chunks).values(
                trial_id=chunk.trial_id,
                attempt_id=attempt_id,
                offset=stored,
                end_offset=stored + len(fresh),
                data=fresh,
            )
        )


def read_log(
    connection: Connection, trial_id: str, *, offset: int, attempt: int | None = None, most: int = PAGE_BYTES
) -> LogPage:
    """Return at most `most` bytes of the log of the trial's newest attempt, from `offset`. Raises NotFound.

    Reads from the beginning if `attempt`, which `offset` belongs to, is no longer the newest.
    """
    newest = NEWEST_ATTEMPT.label("attempt_id")
    of_trial = select(trials.c.state, newest, _NUMBER.label("number"), ablations.c.logs_dropped_at)
    trial = connection.execute(of_trial.join_from(trials, ablations).where(trials.c.id == trial_id)).first()
    if trial is None:
        raise NotFound(f"there is no trial {trial_id!r}")
    if trial.logs_dropped_at is not None:
        dropped = rfc3339(trial.logs_dropped_at)
        raise NotFound(f"the log was dropped {dropped}, ABLATE_LOG_DAYS after its ablation ended; its receipt is kept")
    if attempt not in (None, trial.number):
        offset = 0
    key = (log_chunks.c.trial_id == trial_id, log_chunks.c.attempt_id == trial.attempt_id)
    query = select(log_chunks.c.offset, log_chunks.c.data).where(*key, log_chunks.c.end_offset > offset)
    data, complete = b"", trial.state in TRIAL_OVER
    for start, piece in connection.execute(query.order_by(log_chunks.c.offset)):
        data += piece[max(0, offset - start) :]
        if len(data) > most:
            data, complete = data[: _whole_characters(data, most)], False
            break
    return LogPage(attempt=trial.number, data=data, end_offset=offset + len(data), complete=complete)


def tail_of_break(connection: Connection, attempt: Row[Any]) -> str:
    """Return the end of the log of the trial that broke an attempt; if none is named, of the last one with a log."""
    has_log = select(log_chunks.c.offset).where(
        log_chunks.c.trial_id == trials.c.id, log_chunks.c.attempt_id == attempt.id
    )
    last = select(trials.c.id).where(trials.c.block_id == attempt.block_id, has_log.exists())
    if attempt.arm is not None:
        last = last.where(trials.c.arm == attempt.arm)
    return tail(connection, last.order_by(trials.c.position.desc()).limit(1).scalar_subquery(), attempt.id)


def tail(connection: Connection, trial_id: str | ScalarSelect[str], attempt_id: str) -> str:
    """Return the last whole lines of an attempt's log of a trial, of at most TAIL_BYTES; empty if there is none."""
    own = (log_chunks.c.trial_id == trial_id, log_chunks.c.attempt_id == attempt_id)
    query = select(log_chunks.c.data).where(*own).order_by(log_chunks.c.offset.desc())
    end = b""
    for data in connection.execute(query.limit(_TAIL_CHUNKS)).scalars():
        end = bytes(data) + end
        if len(end) > TAIL_BYTES:
            return end[-TAIL_BYTES:].partition(b"\n")[2].decode("utf-8", "replace")
    return end.decode("utf-8", "replace")


def _whole_characters(data: bytes, length: int) -> int:
    """Return the longest prefix length up to `length` that splits no character of the UTF-8 text `data`."""
    while length > 1 and data[length] & 0xC0 == 0x80:
        length -= 1
    return length


TRIALS_AT_ONCE = 200
"""Trials whose logs one transaction drops, so that others do not wait for it."""


def drop_logs(connection: Connection, *, age_s: float) -> bool:
    """Drop the logs of some trials of an ablation that ended more than `age_s` ago; return whether one was due."""
    ablation_id = _oldest_due(connection, age_s=age_s)
    if ablation_id is not None and not _drop_logs(connection, ablation_id):
        done = update(ablations).where(ablations.c.id == ablation_id)
        connection.execute(done.values(logs_dropped_at=db_now()))
    return ablation_id is not None


def _oldest_due(connection: Connection, *, age_s: float) -> str | None:
    logged, old = ablations.c.logs_dropped_at.is_(None), ablations.c.finished_at < db_now() - age_s
    due = select(ablations.c.id).where(logged, old)
    oldest: str | None = connection.scalar(due.order_by(ablations.c.finished_at).limit(1))
    return oldest


def _drop_logs(connection: Connection, ablation_id: str) -> int:
    """Drop the logs of some trials; return the number of trials."""
    logged = select(log_chunks.c.trial_id).where(log_chunks.c.trial_id == trials.c.id)
    some = select(trials.c.id).where(trials.c.ablation_id == ablation_id, logged.exists()).limit(TRIALS_AT_ONCE)
    ids = list(connection.execute(some).scalars())
    connection.execute(delete(log_chunks).where(log_chunks.c.trial_id.in_(ids)))
    return len(ids)
