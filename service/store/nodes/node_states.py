"""Stopped nodes: an operator drains a node, or it is quarantined because its attempts keep breaking.

A stopped node finishes its running block and gets no other until an operator resumes it.
"""

from typing import Any

from sqlalchemy import Connection, Row, select, update

from experiments.design.problems import nearest
from experiments.outcomes import AttemptState, FailureClass
from experiments.records.messages import DeviceHealth
from experiments.retries import SPEAKS_AGAINST_NODE
from service.errors import NotFound
from service.store.tables import attempts, db_now, nodes, storable

_ENDED = tuple(state for state in AttemptState if state is not AttemptState.RUNNING)
_LOOK_BACK = 30
"""Newest attempts of a node that are read."""


def drain(connection: Connection, name: str, *, by: str) -> None:
    """Let a node finish its block, then give it no work. Raises NotFound."""
    _change(connection, name, draining=True, stopped_by=by, stopped_at=db_now())


def quarantine(connection: Connection, name: str, reason: str, *, by: str) -> None:
    """Give a node no new block, for a reason that operators read. Raises NotFound."""
    _change(connection, name, quarantined_reason=storable(reason), stopped_by=by, stopped_at=db_now())


def resume(connection: Connection, name: str) -> None:
    """Give a node work again; its earlier broken attempts no longer count. Raises NotFound."""
    stopped: dict[str, Any] = {"draining": False, "quarantined_reason": None, "stopped_by": None, "stopped_at": None}
    _change(connection, name, **stopped, resumed_at=db_now())


def _change(connection: Connection, name: str, **values: Any) -> None:
    if not connection.execute(update(nodes).where(nodes.c.name == name).values(**values)).rowcount:
        hint = nearest(name, connection.execute(select(nodes.c.name)).scalars())
        raise NotFound(f"there is no node {name!r}; {hint or 'ablate nodes lists all'}")


def note_device(connection: Connection, node_id: str, state: DeviceHealth, reason: str | None) -> bool:
    """Quarantine a node that reports a bad device; return whether it reports "ok", which ends no quarantine."""
    if state is DeviceHealth.OK:
        return True
    _stop(connection, node_id, f"its worker says: {reason or 'no reason given'}", by="worker")
    return False


def _stop(connection: Connection, node_id: str, reason: str, *, by: str) -> bool:
    """Quarantine a node unless it is quarantined; return whether this call did it."""
    healthy = (nodes.c.id == node_id, nodes.c.quarantined_reason.is_(None))
    values = {"quarantined_reason": storable(reason), "stopped_by": by, "stopped_at": db_now()}
    return bool(connection.execute(update(nodes).where(*healthy).values(**values)).rowcount)


def judge_node(connection: Connection, node_id: str, *, limit: int) -> str | None:
    """Quarantine a node after `limit` broken attempts in a row (0: never); return the reason, None if it goes on.

    Counts attempts since its last finished block whose failure class speaks against the node. They must come from
    different work. An ablation that broke in such a way on another node too does not count.
    """
    if limit == 0:
        return None
    broken = _broken_in_a_row(connection, node_id)
    elsewhere = _broken_elsewhere(connection, node_id, broken)
    broken = [row for row in broken if row.ablation_id not in elsewhere]
    if len(broken) < limit or len({_work(row) for row in broken}) < 2:
        return None
    last = broken[0]
    reason = f"{len(broken)} attempts in a row broke here, the last by {last.failure_class}: {last.message}"
    return reason if _stop(connection, node_id, reason, by="service") else None


def _broken_in_a_row(connection: Connection, node_id: str) -> list[Row[Any]]:
    """Return the attempts that broke on a node since its last finished block and its last resume, newest first."""
    since = select(nodes.c.resumed_at).where(nodes.c.id == node_id).scalar_subquery()
    query = select(attempts).where(attempts.c.node_id == node_id, attempts.c.ended_at > since)
    query = query.where(attempts.c.state.in_(_ENDED)).order_by(attempts.c.started_at.desc()).limit(_LOOK_BACK)
    broken = []
    for row in connection.execute(query):
        if row.state == AttemptState.DONE:
            break
        if row.failure_class in SPEAKS_AGAINST_NODE:
            broken.append(row)
    return broken


def _broken_elsewhere(connection: Connection, node_id: str, broken: list[Row[Any]]) -> set[str]:
    """Return the ablations of `broken` that also broke on another node, by a class that speaks against nodes."""
    query = select(attempts.c.ablation_id).where(
        attempts.c.ablation_id.in_(sorted({row.ablation_id for row in broken})),
        attempts.c.node_id != node_id,
        attempts.c.state.in_(_ENDED),
        attempts.c.failure_class.in_(sorted(SPEAKS_AGAINST_NODE)),
    )
    return set(connection.execute(query.distinct()).scalars())


def _work(row: Row[Any]) -> tuple[str, str]:
    """Return a key for "the same work".

    For a trial that died without a receipt, that is the ablation, because an arm can cause it. Otherwise it is the arm,
    or the attempt if no arm is named, or if the worker was silent: the arm that ran need not be the cause.
    """
    if row.failure_class == FailureClass.NO_RECEIPT:
        return row.ablation_id, ""
    silent = row.state == AttemptState.EXPIRED
    return row.ablation_id, row.id if silent else row.arm or row.id
