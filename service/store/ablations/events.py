"""What tells that there is something new for a stream, for many ablations or trials in one query."""

from collections.abc import Sequence

from sqlalchemy import Connection, func, select

from service.store.ablations.logs import NEWEST_ATTEMPT
from service.store.tables import ablations, events, log_chunks, trials

Mark = tuple[str | int | bool | None, ...]
"""Differs from an earlier one when something is new."""


def ablation_marks(connection: Connection, ids: Sequence[str]) -> dict[str, Mark]:
    """Return a mark of each ablation: it changes with every event, state and verdict."""
    last = select(func.max(events.c.seq)).where(events.c.ablation_id == ablations.c.id).scalar_subquery()
    query = select(ablations.c.id, ablations.c.state, ablations.c.verdict.is_not(None), last)
    return {row[0]: tuple(row[1:]) for row in connection.execute(query.where(ablations.c.id.in_(ids)))}


def log_marks(connection: Connection, trial_ids: Sequence[str]) -> dict[str, Mark]:
    """Return a mark of each trial's log: it changes with every piece, attempt and state."""
    own = (log_chunks.c.trial_id == trials.c.id) & (log_chunks.c.attempt_id == NEWEST_ATTEMPT)
    end = select(func.max(log_chunks.c.end_offset)).where(own).scalar_subquery()
    query = select(trials.c.id, trials.c.state, NEWEST_ATTEMPT, end)
    return {row[0]: tuple(row[1:]) for row in connection.execute(query.where(trials.c.id.in_(trial_ids)))}


ALL = "all"
"""Subject of a stream that tells of changes anywhere."""


def last_event(connection: Connection, ablation_id: str | None = None) -> int:
    """Return the sequence number of the last event of an ablation, or of all; 0 before the first."""
    query = select(func.max(events.c.seq))
    if ablation_id is not None:
        query = query.where(events.c.ablation_id == ablation_id)
    return int(connection.scalar(query) or 0)


def marks_of_all(connection: Connection, _subjects: Sequence[str]) -> dict[str, Mark]:
    """Return the mark of everything: it changes with every event."""
    return {ALL: (last_event(connection),)}
