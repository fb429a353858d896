"""Nodes: what registered, and who was heard lately."""

import re
from typing import Any

from sqlalchemy import Connection, Row, func, insert, select, update

from experiments.ids import id_pattern, new_id
from experiments.outcomes import BlockState
from experiments.records.messages import NodeRegistration
from service.errors import NotFound
from service.store.columns import db_now
from service.store.placement import lanes_that_ran
from service.store.tables import blocks, nodes

_ID = re.compile(id_pattern("nod"))


def register(connection: Connection, name: str, registration: NodeRegistration) -> str:
    """Store what a node found on itself; return the node's id, the same for the same name."""
    values = {
        "node_class": registration.node_class,
        "registration": registration.model_dump_json(),
        "lanes": lanes_that_ran(registration.lanes),
        "registered_at": db_now(),
        "seen_at": db_now(),
    }
    known = connection.execute(select(nodes.c.id).where(nodes.c.name == name).with_for_update()).scalar_one_or_none()
    if known is not None:
        connection.execute(update(nodes).where(nodes.c.id == known).values(**values))
        return str(known)
    node_id = new_id("nod")
    connection.execute(insert(nodes).values(id=node_id, name=name, **values))
    return node_id


def mark_seen(connection: Connection, node_id: str) -> str:
    """Note that the node spoke; return its node class. Raises NotFound for an unknown node."""
    if not _ID.fullmatch(node_id):
        raise NotFound(f"{ascii(node_id)[:80]} is not a node id; PUT /v1/nodes/{{name}} returns one")
    seen = update(nodes).where(nodes.c.id == node_id).values(seen_at=db_now()).returning(nodes.c.node_class)
    node_class = connection.execute(seen).scalar_one_or_none()
    if node_class is None:
        raise NotFound(f"node {node_id!r} is not registered; PUT /v1/nodes/{{name}} first")
    return str(node_class)


def list_nodes(connection: Connection) -> list[Row[Any]]:
    """Return every node with the seconds since it spoke and the block that it runs."""
    query = (
        select(nodes, (db_now() - nodes.c.seen_at).label("silent_s"), func.max(blocks.c.id).label("running_block"))
        .outerjoin(blocks, (blocks.c.node_id == nodes.c.id) & (blocks.c.state == BlockState.RUNNING))
        .group_by(nodes.c.id)
        .order_by(nodes.c.name)
    )
    return list(connection.execute(query))


def count_live(connection: Connection, *, silent_s: float) -> dict[str, int]:
    """Return the number of nodes heard within `silent_s`, by node class."""
    query = select(nodes.c.node_class, func.count()).where(nodes.c.seen_at > db_now() - silent_s)
    return {row[0]: row[1] for row in connection.execute(query.group_by(nodes.c.node_class))}
