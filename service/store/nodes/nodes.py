"""Nodes: registration, the time of the last call, and the trials that run on them."""

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, func, insert, select, update

from ablate.experiments.analysis.placing import Kind
from ablate.experiments.ids import id_pattern, new_id
from ablate.experiments.node_classes import NODE_CLASSES
from ablate.experiments.outcomes import BlockState, TrialState
from ablate.experiments.records.messages import NodeRegistration
from ablate.service.errors import Forbidden, NodeTaken, NotFound
from ablate.service.lifecycle import EventKind
from ablate.service.principals import Principal
from ablate.service.store.access import keys
from ablate.service.store.access.tokens import has_revoked_key, key_name, revoke
from ablate.service.store.nodes.placement import BUSY_ON_A_NODE, TAKES_WORK, back_ends_that_failed, lanes_that_ran
from ablate.service.store.tables import (
    SILENT_S,
    ablations,
    attempts,
    blocks,
    db_now,
    events,
    nodes,
    receipts,
    tokens,
    trials,
)

MOST_POINTS = 400
"""Newest heartbeats of a trial that are read."""
EVER_S = 1e12
"""A silence that includes every registered node."""
GONE_S = 600.0
"""A node that was silent for so long after the end of its allocation's time leaves the list."""
ENDLESS_S = 86_400.0
"""Time of an allocation whose worker did not say when it ends, from its last call."""
IS_HERE = nodes.c.left_at.is_(None)
"""The condition for a node that has not left with its allocation."""
_ID = re.compile(id_pattern("nod"))


def check_key(principal: Principal, name: str, node_class: str) -> None:
    """Raise Forbidden unless the key is that of node `name` and allows it to be of `node_class`."""
    if principal.node != name:
        raise Forbidden(
            f"this key belongs to node '{principal.node}' and cannot register '{name}'; set ABLATE_NODE_NAME to the "
            f"key's node, or ask an operator for a key: ablate nodes add {name}"
        )
    if principal.node_class not in (None, node_class):
        raise Forbidden(
            f"the key of node '{name}' was issued for class '{principal.node_class}'; "
            f"the node registers as '{node_class}'"
        )


def check_owner(name: str, principal: Principal) -> None:
    """Raise Forbidden unless the key is that of node `name`."""
    if principal.node != name:
        raise Forbidden(f"this key belongs to node '{principal.node}', not to '{name}'")


def register(connection: Connection, name: str, registration: NodeRegistration, *, silent_s: float) -> str:
    """Store a node's registration; return its id, the same for the same name.

    Raises NodeTaken if a node of this name but another class called within `silent_s`.
    """
    values = {
        "node_class": registration.node_class,
        "registration": registration.model_dump_json(),
        "lanes": lanes_that_ran(registration.lanes),
        "failed_back_ends": back_ends_that_failed(registration.lanes),
        "num_devices": len(registration.devices),
        "registered_at": db_now(),
        "seen_at": db_now(),
        "ends_at": None,
        "probe_began_at": None,
        "allocation": registration.allocation,
        "left_at": None,
    }
    query = select(nodes.c.id, nodes.c.node_class, SILENT_S.label("silent_s"))
    node = connection.execute(query.where(nodes.c.name == name).with_for_update(key_share=True)).first()
    if node is None:
        node_id = new_id("nod")
        connection.execute(insert(nodes).values(id=node_id, name=name, **values))
        return node_id
    if node.node_class != registration.node_class and node.silent_s <= silent_s:
        raise NodeTaken(
            f"node '{name}' is of class '{node.node_class}' and was heard {node.silent_s:.1f} s ago; it cannot "
            f"register as '{registration.node_class}' before it was silent for {silent_s:g} s"
        )
    connection.execute(update(nodes).where(nodes.c.id == node.id).values(**values))
    return str(node.id)


def mark_seen(connection: Connection, node_id: str, *, owner: str | None, left_s: float | None) -> Row[Any]:
    """Lock the node of the key `owner`, store the time of its call and the `left_s` of its worker, and return it.

    Raises NotFound for an unknown node, Forbidden for another node than the key's.
    """
    if not _ID.fullmatch(node_id):
        raise NotFound(f"{ascii(node_id)[:80]} is not a node id; PUT /v1/nodes/{{name}} returns one")
    times = {"seen_at": db_now(), "ends_at": None if left_s is None else db_now() + left_s}
    seen = update(nodes).where(nodes.c.id == node_id).values(times).returning(nodes)
    row = connection.execute(seen).first()
    if row is None:
        raise NotFound(f"node {node_id!r} is not registered; PUT /v1/nodes/{{name}} first")
    _check_owner(f"node {node_id} is '{row.name}'", row.name, owner)
    return row


def mark_attempt_seen(connection: Connection, attempt_id: str, *, owner: str | None) -> str:
    """Lock the node of an attempt and store the time of its call; return the node's id.

    Raises NotFound, and Forbidden if `owner`, the node of the caller's key, is another one.
    """
    node_id = node_of_attempt(connection, attempt_id, owner=owner)
    connection.execute(update(nodes).where(nodes.c.id == node_id).values(seen_at=db_now()))
    return node_id


def node_of_attempt(connection: Connection, attempt_id: str, *, owner: str | None) -> str:
    """Return the id of the node of an attempt.

    Raises NotFound, and Forbidden if `owner`, the node of the caller's key, is another one.
    """
    query = select(nodes.c.id, nodes.c.name).join(attempts, attempts.c.node_id == nodes.c.id)
    row = connection.execute(query.where(attempts.c.id == attempt_id)).first()
    if row is None:
        raise NotFound(f"there is no attempt {attempt_id!r}")
    _check_owner(f"attempt {attempt_id} was given to node '{row.name}'", row.name, owner)
    return str(row.id)


def _check_owner(what: str, name: str, owner: str | None) -> None:
    if name != owner:
        raise Forbidden(f"{what}, and this key belongs to node '{owner}'")


def list_nodes(connection: Connection) -> list[Row[Any]]:
    """Return every node that has not left, with the seconds since its last call, and whether its key is revoked."""
    query = select(nodes, SILENT_S.label("silent_s"), has_revoked_key(nodes.c.name).label("revoked"))
    return list(connection.execute(query.where(IS_HERE).order_by(nodes.c.name)))


def leave(connection: Connection, name: str) -> None:
    """End the key of a node whose allocation has ended, and list the node no longer. Raises Forbidden, NotFound.

    Its row stays, since receipts name it; so does its signing key, and calibrations belong to devices.
    """
    own = (nodes.c.name == name, nodes.c.allocation.is_not(None), IS_HERE)
    gone = update(nodes).where(*own).values(left_at=db_now()).returning(nodes.c.allocation)
    allocation = connection.execute(gone).scalar()
    if allocation is None:
        raise Forbidden(f"node '{name}' belongs to no allocation of a cluster, so it stays listed")
    revoke(connection, key_name(name), reason=f"allocation {allocation} has ended")


def remove_gone(connection: Connection) -> list[str]:
    """Let nodes leave that are silent although the time of their allocation is over; return their names."""
    over_at = func.coalesce(nodes.c.ends_at, nodes.c.seen_at + ENDLESS_S)
    due = (nodes.c.allocation.is_not(None), IS_HERE, SILENT_S > GONE_S, over_at < db_now() - GONE_S)
    names = list(connection.execute(select(nodes.c.name).where(*due).order_by(nodes.c.name)).scalars())
    for name in names:
        leave(connection, name)
    return names


def count_live(connection: Connection, *, silent_s: float) -> dict[str, int]:
    """Return the number of nodes that called within `silent_s`, by node class."""
    query = select(nodes.c.node_class, func.count()).where(silent_s > SILENT_S, IS_HERE)
    return {row[0]: row[1] for row in connection.execute(query.group_by(nodes.c.node_class))}


def newest_loads(connection: Connection) -> dict[str, float]:
    """Return by node the share of the cores' time that others took during its newest trial with a receipt."""
    loads: dict[str, float] = {}
    for node_id in connection.execute(select(nodes.c.id).where(IS_HERE)).scalars().all():
        query = select(receipts.c.payload).join(attempts, attempts.c.id == receipts.c.attempt_id)
        own = query.where(attempts.c.node_id == node_id).order_by(attempts.c.started_at.desc()).limit(1)
        payload = connection.execute(own).scalar()
        load = None if payload is None else json.loads(payload)["environment"].get("foreign_load")
        if load is not None:
            loads[str(node_id)] = float(load)
    return loads


def runs_now() -> ColumnElement[bool]:
    """Return the condition for the one trial of a block that runs now, by the newest heartbeat.

    Trials start in their block's order and run one at a time. In slices the others wait for their turn.
    """
    other = trials.alias("other")
    since, other_since = func.coalesce(trials.c.runs_since, 0), func.coalesce(other.c.runs_since, 0)
    later = (other_since > since) | ((other_since == since) & (other.c.position > trials.c.position))
    beside = (other.c.block_id == trials.c.block_id, other.c.state == TrialState.RUNNING)
    return (trials.c.state == TrialState.RUNNING) & ~select(other.c.id).where(*beside, later).exists()


def running_trials(connection: Connection, ablation_id: str, *, limit: int) -> Sequence[Row[Any]]:
    """Return the running trials with their progress and the names of their nodes, by block."""
    progress = (trials.c.steps_done, trials.c.steps_total, trials.c.tokens_per_s, trials.c.loss)
    query: Select[Any] = (
        select(trials.c.id, trials.c.arm, trials.c.block_index, *progress, nodes.c.name.label("node"))
        .select_from(blocks)
        .join(trials, trials.c.block_id == blocks.c.id)
        .outerjoin(nodes, nodes.c.id == blocks.c.node_id)
        .where(blocks.c.ablation_id == ablation_id, blocks.c.state == BlockState.RUNNING, runs_now())
    )
    return connection.execute(query.order_by(blocks.c["index"], trials.c.position).limit(limit)).all()


def trials_of_running_blocks(connection: Connection, ablation_id: str, *, limit: int) -> Sequence[Row[Any]]:
    """Return the started trials of running blocks, in their order: id, arm and index of the block."""
    query: Select[Any] = select(trials.c.id, trials.c.arm, trials.c.block_index).join(
        blocks, trials.c.block_id == blocks.c.id
    )
    running = (blocks.c.state == BlockState.RUNNING, trials.c.state == TrialState.RUNNING)
    ordered = query.where(blocks.c.ablation_id == ablation_id, *running).order_by(blocks.c["index"], trials.c.position)
    return connection.execute(ordered.limit(limit)).all()


def heartbeats(connection: Connection, trial_id: str) -> list[dict[str, Any]]:
    """Return the progress of a trial in the attempt that runs, oldest first: steps done, tokens per second, loss."""
    own = (events.c.subject == trial_id, events.c.kind == EventKind.TRIAL_PROGRESS)
    newest = select(events.c.data).where(*own).order_by(events.c.seq.desc()).limit(MOST_POINTS)
    return [json.loads(data) for data in connection.execute(newest).scalars()][::-1]


def running_on(connection: Connection) -> dict[str, list[dict[str, Any]]]:
    """Return the running blocks by node id, each with its ablation, name, index, devices and the arms that run."""
    busy = BUSY_ON_A_NODE.label("devices")
    query = (
        select(blocks.c.node_id, blocks.c.ablation_id, ablations.c.name, blocks.c["index"], busy, trials.c.arm)
        .join(ablations, ablations.c.id == blocks.c.ablation_id)
        .outerjoin(trials, (trials.c.block_id == blocks.c.id) & runs_now())
        .where(blocks.c.state == BlockState.RUNNING)
        .order_by(blocks.c.ablation_id, blocks.c["index"], trials.c.position)
    )
    by_node: dict[str, list[dict[str, Any]]] = {}
    for (node_id, *block), rows in groupby(connection.execute(query), key=lambda row: row[:5]):
        ablation = dict(zip(("ablation", "name", "block_index", "devices"), block, strict=True))
        arms = [row.arm for row in rows if row.arm is not None]
        by_node.setdefault(node_id, []).append({**ablation, "arms": arms})
    return by_node


def kinds(connection: Connection) -> tuple[Kind, ...]:
    """Return the kinds of machines of all nodes here, and those for which a key was issued.

    Of the nodes of a class that have left, the newest stays: more of its kind may come.
    """
    columns = (nodes.c.id, nodes.c.name, nodes.c.node_class, nodes.c.registration, and_(*TAKES_WORK).label("works"))
    own: dict[str, list[tuple[bool, list[int]]]] = defaultdict(list)
    newest = nodes.c.id.in_(select(func.max(nodes.c.id)).group_by(nodes.c.node_class))
    for row in connection.execute(select(*columns).where(IS_HERE | newest).order_by(nodes.c.node_class)):
        if not row.name.endswith(keys.imported_suffix(row.id)):
            sizes = [device["memory_bytes"] for device in json.loads(row.registration)["devices"]]
            own[row.node_class].append((row.works, sizes))
    issued = select(tokens.c.node_class).where(tokens.c.node_class.is_not(None), tokens.c.revoked_at.is_(None))
    for name in connection.execute(issued.distinct()).scalars():
        if name not in own:
            own[name] = []
    return tuple(_kind(name, rows) for name, rows in own.items())


def _kind(name: str, rows: Sequence[tuple[bool, list[int]]]) -> Kind:
    if not rows:
        return Kind(node_class=name, devices=NODE_CLASSES[name].command_devices)
    return Kind(
        node_class=name,
        nodes=sum(bool(works) for works, _sizes in rows),
        devices=max(len(sizes) for _works, sizes in rows),
        memory_bytes=min((size for _works, sizes in rows for size in sizes), default=None),
    )
