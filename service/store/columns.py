"""Column values: times of the database's clock in epoch seconds, and text that both databases accept."""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Double
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement


class db_now(FunctionElement[float]):  # noqa: N801  # reads as the SQL function it is
    """The database's time of evaluation, in seconds since 1970."""

    type = Double()
    inherit_cache = True


@compiles(db_now, "sqlite")
def _sqlite_now(element: Any, compiler: Any, **options: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(db_now, "postgresql")
def _postgresql_now(element: Any, compiler: Any, **options: Any) -> str:
    return "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"


def rfc3339(epoch_s: float) -> str:
    """Format epoch seconds as RFC 3339 UTC with milliseconds."""
    return datetime.fromtimestamp(epoch_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


MOST_CHARACTERS = 2000


def storable(text: str) -> str:
    """Return external text as a column accepts it: cut, and without NUL, which PostgreSQL rejects."""
    return text[:MOST_CHARACTERS].replace("\0", "\\0")
