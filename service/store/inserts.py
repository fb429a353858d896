"""Inserting rows of several tables at once: on PostgreSQL one statement, whatever the number of rows and tables.

A change of rows that are there, or a question, may end it.

A client of PostgreSQL spends more on each message than on the rows in it, and every message is a wait. For SQLite it is
the text of a statement and the check of every value that cost more than the rows: a text is made once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast, overload

from pydantic_core import to_json
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
    literal_column,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite

Row = Mapping[str, Any]

_GIVEN = "given_"
"""Begins the name of a parameter for a column: the column's own name is kept by SQLAlchemy for itself."""

_KEPT = 256
"""Statements of a kind."""
_SQLITE = sqlite.dialect()


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
"""Rows for a target, which all have the same keys; there may be none. What a table has defaults for is among them."""

Then = Update | Select[Any]


@overload
def insert_all(
    connection: Connection, parts: Sequence[Part], parameters: Mapping[str, Any] | None = None, *, then: Then
) -> CursorResult[Any]: ...
@overload
def insert_all(
    connection: Connection,
    parts: Sequence[Part],
    parameters: Mapping[str, Any] | None = None,
    *,
    then: Then | None = None,
) -> CursorResult[Any] | None: ...
def insert_all(
    connection: Connection,
    parts: Sequence[Part],
    parameters: Mapping[str, Any] | None = None,
    *,
    then: Then | None = None,
) -> CursorResult[Any] | None:
    """Insert every part, in this order where the order can be seen, and execute `then`, which reads none of them.

    Return the result of `then`, None without one.

    `parameters` are those of `then` and of the targets' `added`; none of them has a column's name. Statements are kept:
    `then` has to be the same object again for the same change.
    """
    filled = [(target, rows) for target, rows in parts if rows]
    if connection.dialect.name == "postgresql":
        texts = {_rows_name(place): to_json(rows).decode() for place, (_, rows) in enumerate(filled)}
        shape = tuple((target, tuple(rows[0])) for target, rows in filled)
        written = connection.execute(_in_one_statement(shape, then), {**texts, **(parameters or {})})
        return None if then is None else written
    for target, rows in filled:
        text, names = _by_row(target, tuple(rows[0]))
        whole = [{**parameters, **row} for row in rows] if parameters and target.added else rows
        connection.exec_driver_sql(text, [tuple(map(row.__getitem__, names)) for row in whole])
    return None if then is None else connection.execute(then, parameters)


def _rows_name(place: int) -> str:
    return f"rows_{place}"


@lru_cache(maxsize=_KEPT)
def _by_row(target: Target, names: tuple[str, ...]) -> tuple[str, list[str]]:
    """Return the insertion of one row as SQLite's driver takes it, and what goes into its places, in their order."""
    given = {name: bindparam(_GIVEN + name, type_=target.table.c[name].type) for name in names}
    made = sqlite.insert(target.table).inline().values(_values(target, given))
    compiled = _raising(target, made).compile(dialect=_SQLITE)
    places = cast("list[str]", compiled.positiontup)  # this dialect's parameters have places, no names
    return compiled.string, [name.removeprefix(_GIVEN) for name in places]


def _values(target: Target, given: Mapping[str, ColumnElement[Any]]) -> dict[str, ColumnElement[Any]]:
    """Return what goes into a target's columns, from the values of a row."""
    counted = {name: given[name] + number for name, number in target.added.items()}
    return {**given, **counted, **target.made}


@lru_cache(maxsize=_KEPT)
def _in_one_statement(shape: tuple[tuple[Target, tuple[str, ...]], ...], then: Then | None) -> Insert | Then:
    """Return the insertion of all parts, each from one JSON text; the database sees them as simultaneous."""
    inserted = [_from_json(*part, _rows_name(place)) for place, part in enumerate(shape)]
    last: Insert | Then = inserted.pop() if then is None else then
    return last.add_cte(*(other.cte(f"part_{place}") for place, other in enumerate(inserted)))


def _from_json(target: Target, names: tuple[str, ...], parameter: str) -> Insert:
    """Return the insertion of rows from a JSON text, in few words: the driver keeps what it made of short texts."""
    columns = {name: column(name, target.table.c[name].type) for name in names}
    of_table: ColumnElement[Any] = literal_column(f"NULL::{target.table.name}")
    records = func.json_populate_recordset(of_table, bindparam(parameter)).table_valued(*names)
    values = _values(target, columns)
    rows = select(*values.values()).select_from(records)
    made = postgresql.insert(target.table).from_select(list(values), rows, include_defaults=False)
    return _raising(target, made)


def _raising(target: Target, made: postgresql.Insert | sqlite.Insert) -> Insert:
    if target.raised is None:
        return made
    old, new = target.table.c[target.raised], made.excluded[target.raised]
    keys = list(target.table.primary_key.columns)
    return made.on_conflict_do_update(index_elements=keys, set_={target.raised: new}, where=old < new)
