"""Trial logs: bytes at absolute offsets, kept per attempt; readers see the newest attempt's."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, func, insert, select

from experiments.errors import SpecProblem
from experiments.records.messages import LogChunk
from service.errors import Invalid, NotFound
from service.lifecycle import TRIAL_OVER
from service.store.blocks.attempts import LockedAttempt
from service.store.columns import rfc3339
from service.store.tables import ablations, attempts, log_chunks, trials

PAGE_BYTES = 4 * 2**20
"""Most bytes in one answer."""

NEWEST_ATTEMPT = (
    select(attempts.c.id)
    .where(attempts.c.block_id == trials.c.block_id)
    .order_by(attempts.c.number.desc())
    .limit(1)
    .correlate(trials)
    .scalar_subquery()
)
"""The newest attempt at the block of a trial, whether it goes on, is done or broke."""
_NUMBER = (
    select(func.coalesce(func.max(attempts.c.number), 0))
    .where(attempts.c.block_id == trials.c.block_id)
    .correlate(trials)
    .scalar_subquery()
)
"""Of the newest attempt; 0 before the first."""


@dataclass(frozen=True, kw_only=True)
class LogPage:
    """A piece of a log."""

    attempt: int
    """Number of the attempt whose log it is; 0 before the first."""
    data: bytes
    end_offset: int
    """Absolute offset just after `data`."""
    complete: bool
    """Whether the trial is over and nothing follows."""


def append(connection: Connection, locked: LockedAttempt, chunks: Sequence[LogChunk]) -> None:
    """Store chunks; what is already stored is ignored. Raises Invalid when bytes between would be missing."""
    if not chunks:
        return
    known = {row.id for row in locked.trials}
    for number, chunk in enumerate(chunks):
        if chunk.trial_id not in known:
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

    An offset in the log of an `attempt` that is not the newest any more says nothing: then the log is read from its
    beginning.
    """
    newest = NEWEST_ATTEMPT.label("attempt_id")
    known = select(trials.c.state, newest, _NUMBER.label("number"), ablations.c.logs_dropped_at)
    trial = connection.execute(known.join_from(trials, ablations).where(trials.c.id == trial_id)).first()
    if trial is None:
        raise NotFound(f"there is no trial {trial_id!r}")
    if trial.logs_dropped_at is not None:
        dropped = rfc3339(trial.logs_dropped_at)
        raise NotFound(f"the log was dropped {dropped}: the ablation was over for ABLATE_LOG_DAYS; its receipt stays")
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


def _whole_characters(data: bytes, length: int) -> int:
    """Return the longest length up to `length` that cuts no character of the UTF-8 text `data` in two."""
    while length > 1 and data[length] & 0xC0 == 0x80:
        length -= 1
    return length
