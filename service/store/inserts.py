"""Inserting many rows at once."""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Insert, Table, bindparam, column, func, insert, select


def insert_many(connection: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Insert `rows`, which all have the same keys; nothing when there are none.

    PostgreSQL would otherwise get one message per row, and a client spends more on those than on everything else.
    """
    if not rows:
        return
    if connection.dialect.name == "postgresql":
        connection.execute(_from_json(table, tuple(rows[0])), {"rows": json.dumps(rows)})
    else:
        connection.execute(insert(table), rows)


@lru_cache(maxsize=16)
def _from_json(table: Table, names: tuple[str, ...]) -> Insert:
    columns = [column(name, table.c[name].type) for name in names]
    records = func.json_to_recordset(bindparam("rows")).table_valued(*columns).render_derived(with_types=True)
    return insert(table).from_select(list(names), select(*[records.c[name] for name in names]), include_defaults=False)
