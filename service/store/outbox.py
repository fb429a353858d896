"""What must happen after a commit: rows written in the same transaction, done later, retried until they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from sqlalchemy import Connection, Row, Select, delete, func, select, update

from service.lifecycle import OutboxKind
from service.store.columns import db_now, storable
from service.store.inserts import Target, insert_all
from service.store.tables import outbox

NEW = Target(table=outbox, made={"created_at": db_now(), "due_at": db_now()})


class Rank(IntEnum):
    """Which rows of a kind come first."""

    FIRST = 0
    """Somebody waits for it."""
    LATER = 1
    """It comes in masses, and nobody waits for a single one: cancelled ablations, everything once more."""


@dataclass(frozen=True, kw_only=True)
class OutboxRow:
    """One thing to do about one ablation or node class."""

    id: int
    kind: OutboxKind
    key: str
    tries: int
    """Tries before this one."""


def add(connection: Connection, kind: OutboxKind, key: str, *, rank: Rank = Rank.FIRST, tries: int = 0) -> None:
    """Ask for `kind` to be done about `key` (an ablation id, or a node class for a wake-up), tried before or not."""
    insert_all(connection, [(NEW, [row(kind, key, rank=rank) | {"tries": tries}])])


def row(kind: OutboxKind, key: str, *, rank: Rank = Rank.FIRST) -> dict[str, str | int]:
    """Return the row that asks for it, for `NEW`."""
    return {"kind": kind.value, "key": key, "rank": rank.value, "tries": 0}


def due(connection: Connection, kind: OutboxKind, *, limit: int) -> list[OutboxRow]:
    """Return due rows without taking them, oldest first."""
    return rows_of(connection, due_rows(kind, limit=limit).order_by(outbox.c.due_at, outbox.c.id))


def due_rows(kind: OutboxKind, *, limit: int) -> Select[Any]:
    """Ask for rows of `kind` that are due."""
    return select(outbox).where(outbox.c.kind == kind, outbox.c.due_at <= db_now()).limit(limit)


def in_order(query: Select[Any], *, last_first: bool) -> Select[Any]:
    """Ask for them by rank, or by rank backwards, and then the oldest first.

    Whoever takes for ever asks for the last rank first now and then, so that it is not put off for ever.
    """
    rank = outbox.c.rank.desc() if last_first else outbox.c.rank
    return query.order_by(rank, outbox.c.due_at, outbox.c.id)


def rows_of(connection: Connection, query: Select[Any]) -> list[OutboxRow]:
    """Return the rows that `query` asks for."""
    return [_outbox_row(row) for row in connection.execute(query)]


def _outbox_row(row: Row[Any]) -> OutboxRow:
    return OutboxRow(id=row.id, kind=OutboxKind(row.kind), key=row.key, tries=row.tries)


def take(
    connection: Connection, kind: OutboxKind, *, hold_s: float, limit: int = 1, last_first: bool = False
) -> list[OutboxRow]:
    """Take due rows, by rank and then the oldest, and hide them for `hold_s`: a taker that dies only delays them."""
    query = in_order(due_rows(kind, limit=limit), last_first=last_first)
    rows = rows_of(connection, query.with_for_update(skip_locked=True))
    if rows:
        taken = update(outbox).where(outbox.c.id.in_([row.id for row in rows]))
        connection.execute(taken.values(due_at=db_now() + hold_s, tries=outbox.c.tries + 1))
    return rows


def hold(connection: Connection, ids: Sequence[int], *, hold_s: float) -> None:
    """Go on hiding rows that are still being worked on."""
    connection.execute(update(outbox).where(outbox.c.id.in_(ids)).values(due_at=db_now() + hold_s))


def done(connection: Connection, ids: list[int]) -> None:
    """Forget rows whose work is done."""
    connection.execute(delete(outbox).where(outbox.c.id.in_(ids)))


def retry(connection: Connection, ids: list[int], *, delay_s: float, error: str) -> None:
    """Make rows due again after `delay_s`, with the reason."""
    values = {"due_at": db_now() + delay_s, "last_error": storable(error)}
    connection.execute(update(outbox).where(outbox.c.id.in_(ids)).values(**values))


def put_back(connection: Connection, ids: list[int]) -> None:
    """Make rows due behind the others of their rank, as if not tried: a part is done, and nothing failed."""
    untried = {"due_at": db_now(), "tries": outbox.c.tries - 1, "last_error": None}
    connection.execute(update(outbox).where(outbox.c.id.in_(ids)).values(**untried))


def drop_older(connection: Connection, kind: OutboxKind, *, age_s: float) -> int:
    """Forget rows of `kind` created more than `age_s` ago; return how many."""
    return connection.execute(
        delete(outbox).where(outbox.c.kind == kind, outbox.c.created_at < db_now() - age_s)
    ).rowcount


def backlog(connection: Connection) -> list[tuple[str, int, float]]:
    """Return (kind, rows, age of the oldest in seconds) for every kind that has rows."""
    query = select(outbox.c.kind, func.count(), db_now() - func.min(outbox.c.created_at)).group_by(outbox.c.kind)
    return [(kind, count, age) for kind, count, age in connection.execute(query)]
