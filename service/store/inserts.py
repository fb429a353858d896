"""Inserting rows of several tables at once: on PostgreSQL one statement, whatever the number of rows and tables.

A change of rows that are there may end it.

A client of PostgreSQL spends more on each message than on the rows in it, and every message is a wait.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    CursorResult,
    Insert,
    Select,
    Table,
    Update,
    bindparam,
    column,
    func,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite

Row = Mapping[str, Any]

_KEPT = 256
"""Statements of a kind."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """A table that rows go into."""

    table: Table
    made: Mapping[str, ColumnElement[Any]] = field(default_factory=dict)
    """Columns whose value the database makes."""
    added: Mapping[str, ColumnElement[int]] = field(default_factory=dict)
    """Columns whose value in a row counts from a number that the database knows."""
    raised: str | None = None
    """A column that a row of the same primary key raises, and never lowers, in the one that is there."""


Part = tuple[Target, Sequence[Row]]
"""Rows for a target, which all have the same keys; there may be none."""


def insert_all(
    connection: Connection,
    parts: Sequence[Part],
    parameters: Mapping[str, Any] | None = None,
    *,
    then: Update | None = None,
) -> CursorResult[Any] | None:
    """Insert every part, in this order where the order can be seen, and execute `then`, which reads none of them.

    Return the result of `then`, None without one.

    `parameters` are those of `then` and of the targets' `added`; none of them has a column's name. Statements are kept:
    `then` has to be the same object again for the same change.
    """
    filled = [(target, rows) for target, rows in parts if rows]
    if connection.dialect.name == "postgresql":
        texts = {_rows_name(place): json.dumps(rows) for place, (_, rows) in enumerate(filled)}
        shape = tuple((target, tuple(rows[0])) for target, rows in filled)
        written = connection.execute(_in_one_statement(shape, then), {**texts, **(parameters or {})})
        return None if then is None else written
    for target, rows in filled:
        starts = {name: connection.scalar(_number(known), parameters) or 0 for name, known in target.added.items()}
        counted = [{**row, **{name: row[name] + start for name, start in starts.items()}} for row in rows]
        connection.execute(_by_row(target), counted)
    return None if then is None else connection.execute(then, parameters)


def _rows_name(place: int) -> str:
    return f"rows_{place}"


@lru_cache(maxsize=_KEPT)
def _by_row(target: Target) -> Insert:
    return _raising(target, sqlite.insert(target.table).inline().values(**target.made))


@lru_cache(maxsize=_KEPT)
def _number(known: ColumnElement[int]) -> Select[tuple[int]]:
    return select(known)


@lru_cache(maxsize=_KEPT)
def _in_one_statement(shape: tuple[tuple[Target, tuple[str, ...]], ...], then: Update | None) -> Insert | Update:
    """Return the insertion of all parts, each from one JSON text; the database sees them as simultaneous."""
    inserted = [_from_json(*part, _rows_name(place)) for place, part in enumerate(shape)]
    last: Insert | Update = inserted.pop() if then is None else then
    return last.add_cte(*(other.cte(f"part_{place}") for place, other in enumerate(inserted)))


def _from_json(target: Target, names: tuple[str, ...], parameter: str) -> Insert:
    columns = [column(name, target.table.c[name].type) for name in names]
    records = func.json_to_recordset(bindparam(parameter)).table_valued(*columns).render_derived(with_types=True)
    values = {name: records.c[name] + target.added[name] if name in target.added else records.c[name] for name in names}
    values |= target.made
    made = postgresql.insert(target.table).from_select(list(values), select(*values.values()), include_defaults=False)
    return _raising(target, made)


def _raising(target: Target, made: postgresql.Insert | sqlite.Insert) -> Insert:
    if target.raised is None:
        return made
    old, new = target.table.c[target.raised], made.excluded[target.raised]
    keys = list(target.table.primary_key.columns)
    return made.on_conflict_do_update(index_elements=keys, set_={target.raised: new}, where=old < new)
