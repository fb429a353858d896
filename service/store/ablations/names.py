"""What people call an ablation: its id, its name, the beginning of either, or `latest` of what people submitted.

A name may be used again; then it means the newest ablation of that name. A beginning has to be that of one name only.
"""

from sqlalchemy import ColumnElement, Connection, func, select

from experiments.design.problems import nearest
from service.errors import Ambiguous, NotFound
from service.principals import SERVICE
from service.store.tables import ablations

LATEST = "latest"
_SHOWN = 6
_LOOKED_AT = 500
"""Newest ablations among whose names the one that was meant is looked for."""
ID_CHARS = 30
"""Of a whole id; no sign of one sorts behind Z."""


def find_ablation(connection: Connection, called: str) -> str:
    """Return the id of the ablation that somebody calls `called`. Raises NotFound, Ambiguous."""
    if called == LATEST:
        return _newest(connection)
    if connection.scalar(select(ablations.c.id).where(ablations.c.id == called)):
        return called
    return _by_id(connection, called) if called.startswith("abl_") else _by_name(connection, called)


def _newest(connection: Connection) -> str:
    by_somebody = ablations.c.submitted_by != SERVICE
    found: str | None = connection.scalar(select(func.max(ablations.c.id)).where(by_somebody))
    if found is None:
        raise NotFound("there is no ablation yet; `ablate run demo` submits one")
    return found


def _by_id(connection: Connection, called: str) -> str:
    among = ablations.c.id.between(called, called.ljust(ID_CHARS, "Z"))
    query = select(ablations.c.id).where(among, ablations.c.id.startswith(called, autoescape=True))
    return _only(called, list(connection.execute(query.order_by(ablations.c.id).limit(_SHOWN)).scalars()))


def _by_name(connection: Connection, called: str) -> str:
    named = select(ablations.c.name, func.max(ablations.c.id)).group_by(ablations.c.name)
    exact = connection.execute(named.where(ablations.c.name == called)).first()
    if exact is not None:
        return str(exact[1])
    begin = named.where(_name_begins(connection, called))
    rows = connection.execute(begin.order_by(ablations.c.name).limit(_SHOWN)).all()
    if not rows:
        raise NotFound(_begins_none(called, nearest(called, _newest_names(connection))))
    _only(called, [row[0] for row in rows])
    return str(rows[0][1])


def _newest_names(connection: Connection) -> list[str]:
    newest = select(ablations.c.name).order_by(ablations.c.id.desc()).limit(_LOOKED_AT)
    return list(connection.execute(newest).scalars())


def _begins_none(called: str, hint: str | None = None) -> str:
    return f"there is no ablation whose name or id begins with {called!r}{'' if hint is None else '; ' + hint}"


def _name_begins(connection: Connection, called: str) -> ColumnElement[bool]:
    """Return the condition that an index serves: in SQLite that is GLOB, whose signs no name has. LIKE ignores case."""
    if connection.dialect.name == "sqlite":
        return ablations.c.name.op("GLOB", is_comparison=True)(f"{called}*")
    return ablations.c.name.startswith(called, autoescape=True)


def _only(called: str, found: list[str]) -> str:
    if not found:
        raise NotFound(_begins_none(called))
    if len(found) > 1:
        more = " and more" if len(found) == _SHOWN else ""
        raise Ambiguous(f"{called!r} is the beginning of several: {', '.join(found)}{more}; write more of it")
    return found[0]
