"""Find an ablation by id, name, a unique prefix of either, or `latest` (the newest that a person submitted).

If several ablations have the name, it means the newest.
"""

from sqlalchemy import ColumnElement, Connection, func, select

from ablate.experiments.design.problems import nearest
from ablate.service.errors import Ambiguous, NotFound
from ablate.service.principals import SERVICE
from ablate.service.store.tables import ablations

LATEST = "latest"
_SHOWN = 6
_LOOKED_AT = 500
"""Newest ablations whose names are compared to suggest a similar one."""
_ID_CHARS = 30
"""Length of an id. No character of an id sorts after Z."""


def find_ablation(connection: Connection, called: str) -> str:
    """Return the id of the ablation with this id, name or prefix. Raises NotFound, Ambiguous."""
    if called == LATEST:
        return _newest(connection)
    if connection.scalar(select(ablations.c.id).where(ablations.c.id == called)):
        return called
    return _by_id(connection, called) if called.startswith("abl_") else _by_name(connection, called)


def _newest(connection: Connection) -> str:
    by_somebody = ablations.c.submitted_by != SERVICE
    newest: str | None = connection.scalar(select(func.max(ablations.c.id)).where(by_somebody))
    if newest is None:
        raise NotFound("there is no ablation yet; `ablate run demo` submits one")
    return newest


def _by_id(connection: Connection, called: str) -> str:
    among = ablations.c.id.between(called, called.ljust(_ID_CHARS, "Z"))
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
    """Return a case-sensitive condition that the index serves: GLOB in SQLite, whose LIKE ignores case."""
    if connection.dialect.name == "sqlite":
        return ablations.c.name.op("GLOB", is_comparison=True)(f"{called}*")
    return ablations.c.name.startswith(called, autoescape=True)


def _only(called: str, matches: list[str]) -> str:
    if not matches:
        raise NotFound(_begins_none(called))
    if len(matches) > 1:
        more = " and more" if len(matches) == _SHOWN else ""
        raise Ambiguous(f"{called!r} is the beginning of several: {', '.join(matches)}{more}; write more of it")
    return matches[0]
