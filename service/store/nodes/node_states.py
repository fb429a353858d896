"""Stopped nodes: an operator drains a node, or it is quarantined because its attempts keep breaking.

A stopped node finishes its running block and gets no other until an operator resumes it. A node that no person stopped
also probes itself after a while, and works again if the probe passes.
"""

import json
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from sqlalchemy import Connection, Row, select, update

from ablate.experiments.design.problems import nearest
from ablate.experiments.outcomes import AttemptState, FailureClass
from ablate.experiments.records.messages import DeviceHealth
from ablate.service.errors import NotFound
from ablate.service.store.tables import ablations, attempts, db_now, has_passed, nodes, storable

_ENDED = tuple(state for state in AttemptState if state is not AttemptState.RUNNING)
_AGAINST_NODE = frozenset(failure for failure in FailureClass if failure.rule.speaks_against_node)
_LOOK_BACK = 30
"""Newest attempts of a node that are read."""
FIRST_PROBE_S, LONGEST_PROBE_S = 60.0, 3600.0
"""Time until a quarantined node probes itself. It doubles with every probe until the node finishes a block."""


def drain(connection: Connection, name: str, *, by: str) -> None:
    """Let a node finish its block, then give it no work. Raises NotFound."""
    _change(connection, name, draining=True, stopped_by=by, stopped_at=db_now())


def quarantine(connection: Connection, name: str, reason: str, *, by: str) -> None:
    """Give a node no new block, for a reason that operators read. Raises NotFound."""
    values = {"quarantined_reason": storable(reason), "stopped_by": by, "stopped_at": db_now()}
    _change(connection, name, **values, **_NO_PROBE)


_NO_PROBE: dict[str, Any] = {"probe_at": None, "probe_began_at": None}
_STARTED: dict[str, Any] = {"quarantined_reason": None, "stopped_by": None, "stopped_at": None, **_NO_PROBE}


def resume(connection: Connection, name: str) -> None:
    """Give a node work again; its earlier broken attempts no longer count. Raises NotFound."""
    _change(connection, name, draining=False, **_STARTED, resumed_at=db_now(), probes=0)


def _change(connection: Connection, name: str, **values: Any) -> None:
    if not connection.execute(update(nodes).where(nodes.c.name == name).values(**values)).rowcount:
        hint = nearest(name, connection.execute(select(nodes.c.name)).scalars())
        raise NotFound(f"there is no node {name!r}; {hint or 'ablate nodes lists all'}")


def note_device(connection: Connection, node_id: str, state: DeviceHealth, reason: str | None) -> bool:
    """Quarantine a node that reports a bad device; return whether it reports "ok", which ends no quarantine."""
    if state is DeviceHealth.OK:
        return True
    _stop(connection, node_id, _of_worker(reason), by="worker")
    return False


def _of_worker(reason: str | None) -> str:
    return f"its worker says: {reason or 'no reason given'}"


def begin_probe(connection: Connection, node: Row[Any]) -> bool:
    """Return whether a quarantined node, which the caller has locked, is to probe itself now."""
    if node.probe_at is None:
        return False
    rest_s = _probe_rest_s(node.probes + 1)
    due = (nodes.c.id == node.id, has_passed(nodes.c.probe_at, longest_s=LONGEST_PROBE_S))
    values = {"probe_at": db_now() + rest_s, "probe_began_at": db_now(), "probes": node.probes + 1}
    return bool(connection.execute(update(nodes).where(*due).values(**values)).rowcount)


def end_probe(connection: Connection, node_id: str, state: DeviceHealth, reason: str | None) -> None:
    """Let a node work again whose probe of itself has passed, else keep it stopped for this reason.

    Nothing changes if a person has stopped or resumed it in the meantime.
    """
    passed = state is DeviceHealth.OK
    values = {**_STARTED, "resumed_at": db_now()} if passed else {"quarantined_reason": storable(_of_worker(reason))}
    own = (nodes.c.id == node_id, nodes.c.probe_at.is_not(None))
    connection.execute(update(nodes).where(*own).values(**values))


def _probe_rest_s(probes: int) -> float:
    """Return how long a node rests before its next probe, after so many."""
    return float(min(FIRST_PROBE_S * 2 ** min(probes, 10), LONGEST_PROBE_S))


def _stop(connection: Connection, node_id: str, reason: str, *, by: str) -> bool:
    """Quarantine a node until a probe of it passes, unless it is quarantined; return whether this call did it."""
    query = select(nodes.c.probes, nodes.c.resumed_at).where(nodes.c.id == node_id)
    node = connection.execute(query.where(nodes.c.quarantined_reason.is_(None)).with_for_update(key_share=True)).first()
    if node is None:
        return False
    done = (attempts.c.node_id == node_id, attempts.c.state == AttemptState.DONE, attempts.c.ended_at > node.resumed_at)
    probes = 0 if connection.scalar(select(attempts.c.id).where(*done).limit(1)) else node.probes
    values = {
        "quarantined_reason": storable(reason),
        "stopped_by": by,
        "stopped_at": db_now(),
        "probe_at": db_now() + _probe_rest_s(probes),
        "probe_began_at": None,
        "probes": probes,
    }
    connection.execute(update(nodes).where(nodes.c.id == node_id).values(**values))
    return True


def judge_node(connection: Connection, node_id: str, *, limit: int) -> str | None:
    """Quarantine a node after `limit` broken attempts in a row (0: never); return the reason, None if it goes on.

    Counts attempts since its last finished block whose failure class speaks against the node. Different arms of
    different ablations must be among them: one arm, or one ablation, may be the cause itself. An ablation that broke in
    such a way on another node too does not count.
    """
    if limit == 0:
        return None
    broken = _broken_in_a_row(connection, node_id)
    elsewhere = _broken_elsewhere(connection, node_id, broken)
    broken = [row for row in broken if row.ablation_id not in elsewhere]
    if len(broken) < limit or not _are_different_work(connection, broken):
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
        if row.failure_class in _AGAINST_NODE:
            broken.append(row)
    return broken


def _broken_elsewhere(connection: Connection, node_id: str, broken: list[Row[Any]]) -> set[str]:
    """Return the ablations of `broken` that also broke on another node, by a class that speaks against nodes."""
    query = select(attempts.c.ablation_id).where(
        attempts.c.ablation_id.in_(sorted({row.ablation_id for row in broken})),
        attempts.c.node_id != node_id,
        attempts.c.state.in_(_ENDED),
        attempts.c.failure_class.in_(sorted(_AGAINST_NODE)),
    )
    return set(connection.execute(query.distinct()).scalars())


def _are_different_work(connection: Connection, broken: Sequence[Row[Any]]) -> bool:
    """Return whether two of the attempts broke by different arms of different ablations.

    Arms of one digest are the same arm in every ablation. An unknown arm differs from those of other ablations. After
    the silence of a worker, the arm that ran need not be the cause.
    """
    ids = {row.ablation_id for row in broken}
    if len(ids) < 2:
        return False
    plans = connection.execute(select(ablations.c.id, ablations.c.plan).where(ablations.c.id.in_(sorted(ids))))
    digests = {(row.id, arm["name"]): arm["digest"] for row in plans for arm in json.loads(row.plan)["arms"]}
    works = {(row.ablation_id, digests.get((row.ablation_id, row.arm), row.ablation_id)) for row in broken}
    return any(one[0] != two[0] and one[1] != two[1] for one, two in combinations(works, 2))
