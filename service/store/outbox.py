"""Work that follows a commit: rows written in the same transaction, handled later, retried until they succeed."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from sqlalchemy import Connection, Select, delete, func, insert, select, update

from ablate.service.lifecycle import OutboxKind
from ablate.service.store.tables import db_now, has_passed, outbox, storable

LONGEST_PAUSE_S = 60.0
"""Longest time until a row is due again."""


class Rank(IntEnum):
    """Which rows of a kind come first."""

    FIRST = 0
    """Somebody waits for it."""
    LATER = 1
    """One of a mass of rows for which nobody waits: cancelled ablations, a rebuild of MLflow."""


@dataclass(frozen=True, kw_only=True)
class OutboxRow:
    """One piece of work about one ablation or node class."""

    id: int
    kind: OutboxKind
    key: str
    tries: int
    """Tries before this one."""


def add(connection: Connection, kind: OutboxKind, key: str, *, rank: Rank = Rank.FIRST, tries: int = 0) -> None:
    """Ask for `kind` of work about `key`: an ablation id, or a node class for a wake-up."""
    row = insert(outbox).values(kind=kind, key=key, rank=rank, tries=tries, created_at=db_now(), due_at=db_now())
    connection.execute(row)


def due(connection: Connection, kind: OutboxKind, *, limit: int) -> list[OutboxRow]:
    """Return due rows of `kind`, oldest first."""
    return _rows(connection, _due(kind).order_by(outbox.c.due_at, outbox.c.id).limit(limit))


def first_due(connection: Connection, kinds: Sequence[OutboxKind], *, last_first: bool = False) -> str | None:
    """Return the key that is due first among `kinds`, in their order, then by rank, then the oldest.

    `last_first` reverses the ranks. A taker sets it now and then, so that the last rank does not wait for ever.
    """
    rank = outbox.c.rank.desc() if last_first else outbox.c.rank
    for kind in kinds:
        rows = _rows(connection, _due(kind).order_by(rank, outbox.c.due_at, outbox.c.id).limit(1))
        if rows:
            return rows[0].key
    return None


def take(connection: Connection, kinds: Sequence[OutboxKind], key: str, *, hold_s: float) -> list[OutboxRow]:
    """Count a try at every row of `kinds` about `key`, hide them for `hold_s`, and return them.

    One answer serves them all. The pause lets other rows go first if this one kills its process.
    """
    rows = _rows(connection, select(outbox).where(outbox.c.kind.in_(kinds), outbox.c.key == key).order_by(outbox.c.id))
    values = {"due_at": db_now() + hold_s, "tries": outbox.c.tries + 1}
    connection.execute(update(outbox).where(outbox.c.id.in_([row.id for row in rows])).values(values))
    return rows


def _due(kind: OutboxKind) -> Select[Any]:
    return select(outbox).where(outbox.c.kind == kind, has_passed(outbox.c.due_at, longest_s=LONGEST_PAUSE_S))


def _rows(connection: Connection, query: Select[Any]) -> list[OutboxRow]:
    return [
        OutboxRow(id=row.id, kind=OutboxKind(row.kind), key=row.key, tries=row.tries)
        for row in connection.execute(query)
    ]


def done(connection: Connection, ids: Sequence[int]) -> None:
    """Delete rows whose work is done."""
    connection.execute(delete(outbox).where(outbox.c.id.in_(ids)))


def retry(connection: Connection, ids: Sequence[int], *, delay_s: float, error: str) -> None:
    """Make rows due again after `delay_s`, and store the error."""
    values = {"due_at": db_now() + delay_s, "last_error": storable(error)}
    connection.execute(update(outbox).where(outbox.c.id.in_(ids)).values(**values))


def put_back(connection: Connection, ids: Sequence[int]) -> None:
    """Make rows due behind the others of their rank without counting the try: a part of the work is done."""
    untried = {"due_at": db_now(), "tries": outbox.c.tries - 1, "last_error": None}
    connection.execute(update(outbox).where(outbox.c.id.in_(ids)).values(**untried))


def drop_older(connection: Connection, kind: OutboxKind, *, age_s: float) -> int:
    """Delete rows of `kind` that are older than `age_s`; return how many."""
    return connection.execute(
        delete(outbox).where(outbox.c.kind == kind, outbox.c.created_at < db_now() - age_s)
    ).rowcount


@dataclass(frozen=True, kw_only=True)
class FailedWork:
    """Work that failed and is tried again."""

    count: int
    """Number of keys."""
    error: str
    """The newest error; empty without one."""


def failing(connection: Connection, kinds: Sequence[OutboxKind], *, key: str | None = None) -> FailedWork:
    """Return the work of `kinds` whose last try failed, of all keys or of one."""
    failed = [
        outbox.c.kind.in_(kinds),
        outbox.c.last_error.is_not(None),
        *([] if key is None else [outbox.c.key == key]),
    ]
    count = connection.scalar(select(func.count(outbox.c.key.distinct())).where(*failed)) or 0
    newest = select(outbox.c.last_error).where(*failed).order_by(outbox.c.due_at.desc()).limit(1)
    return FailedWork(count=count, error=(connection.scalar(newest) or "") if count else "")


def backlog(connection: Connection) -> list[tuple[str, int, float]]:
    """Return (kind, rows, age of the oldest in seconds) for every kind that has rows."""
    query = select(outbox.c.kind, func.count(), db_now() - func.min(outbox.c.created_at)).group_by(outbox.c.kind)
    return [(kind, count, age) for kind, count, age in connection.execute(query)]
