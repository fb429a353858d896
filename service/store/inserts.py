"""Inserting rows of several tables at once: on PostgreSQL one statement, whatever the number of rows and tables.

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
    Insert,
    Select,
    Table,
    bindparam,
    column,
    func,
    insert,
    select,
)

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """A table that rows go into."""

    table: Table
    made: Mapping[str, ColumnElement[Any]] = field(default_factory=dict)
    """Columns whose value the database makes."""
    added: Mapping[str, ColumnElement[int]] = field(default_factory=dict)
    """Columns whose value in a row counts from a number that the database knows."""


Part = tuple[Target, Sequence[Row]]
"""Rows for a target, which all have the same keys; there may be none."""


def insert_all(connection: Connection, parts: Sequence[Part], parameters: Mapping[str, Any] | None = None) -> None:
    """Insert every part, in this order where the order can be seen; `parameters` are those of the targets' `added`."""
    filled = [(target, rows) for target, rows in parts if rows]
    if connection.dialect.name == "postgresql":
        texts = {_rows_name(place): json.dumps(rows) for place, (_, rows) in enumerate(filled)}
        shape = tuple((target, tuple(rows[0])) for target, rows in filled)
        connection.execute(_in_one_statement(shape), {**texts, **(parameters or {})})
        return
    for target, rows in filled:
        starts = {name: connection.scalar(_number(known), parameters) or 0 for name, known in target.added.items()}
        counted = [{**row, **{name: row[name] + start for name, start in starts.items()}} for row in rows]
        connection.execute(_by_row(target), counted)


def _rows_name(place: int) -> str:
    return f"rows_{place}"


@lru_cache(maxsize=64)
def _by_row(target: Target) -> Insert:
    return insert(target.table).inline().values(**target.made)


@lru_cache(maxsize=64)
def _number(known: ColumnElement[int]) -> Select[tuple[int]]:
    return select(known)


@lru_cache(maxsize=64)
def _in_one_statement(shape: tuple[tuple[Target, tuple[str, ...]], ...]) -> Insert:
    """Return the insertion of all parts, each from one JSON text; the database sees them as simultaneous."""
    *others, last = [_from_json(*part, _rows_name(place)) for place, part in enumerate(shape)]
    return last.add_cte(*(other.cte(f"part_{place}") for place, other in enumerate(others)))


def _from_json(target: Target, names: tuple[str, ...], parameter: str) -> Insert:
    columns = [column(name, target.table.c[name].type) for name in names]
    records = func.json_to_recordset(bindparam(parameter)).table_valued(*columns).render_derived(with_types=True)
    values = {name: records.c[name] + target.added[name] if name in target.added else records.c[name] for name in names}
    values |= target.made
    return insert(target.table).from_select(list(values), select(*values.values()), include_defaults=False)
