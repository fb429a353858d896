"""The nodes of a block that runs on several: who may share it, their places, and their parts of each trial.

One transaction gives a block to all of its nodes or to none (`claims.claim_together`). Node number 0 has the attempt
and the block's lease, as on one node. Each other node has a place with a lease of its own under the same token, and
takes it by its next claim. The attempt ends when any of these leases runs out.
"""

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select, case, insert, literal_column, select, update

from experiments.outcomes import AblationState, AttemptState, BlockState, FailureClass
from experiments.records.messages import BlockNode, BlockNodes, NodePart
from service.errors import Invalid, NodeBusy, StaleToken
from service.store.access.tokens import has_revoked_key
from service.store.blocks.attempts import AHEAD_S, AttemptFailure, LockedAttempt, end_without_result, lock_block
from service.store.nodes.placement import TAKES_WORK, Needs, fits, lacks, may_run_again
from service.store.tables import ablations, blocks, db_now, has_passed, members, nodes

SEVERAL = blocks.c.num_nodes > literal_column("1")
"""Whether a block runs on several nodes, in the words of the index."""
_UNNAMED = "-"
"""Stored for a claim without an id, which no other claim repeats."""
_HELD = (
    members.c.number > 0,
    members.c.left_at.is_(None),
    blocks.c.id == members.c.block_id,
    blocks.c.attempt_id == members.c.attempt_id,
    blocks.c.state == BlockState.RUNNING,
)
"""Conditions of a place that a node has now."""


def take_place(connection: Connection, node: Row[Any], *, lease_s: float, claim_id: str | None) -> str | None:
    """Return the attempt in which a locked node has a place, None if it has none. Its claim takes the place.

    Raises NodeBusy if another claim of the node has taken it: the worker that made it is gone, or still runs.
    """
    place = connection.execute(select(members).where(members.c.node_id == node.id, *_HELD)).first()
    if place is None:
        return None
    if place.claim_id is not None and (claim_id is None or place.claim_id != claim_id):
        raise NodeBusy(f"node {node.id} has a place in block {place.block_id}; it is free when its lease runs out")
    own = update(members).where(members.c.attempt_id == place.attempt_id, members.c.number == place.number)
    connection.execute(own.values(claim_id=claim_id or _UNNAMED, lease_until=db_now() + lease_s))
    return str(place.attempt_id)


def shared_blocks(connection: Connection, node: Row[Any]) -> list[Row[Any]]:
    """Return the blocks on several nodes that an idle `node` could run with others, one per ablation, in no order.

    Enough nodes take work for each of them, though some may be busy now.
    """
    if node.meeting is None:
        return []
    columns = (blocks.c.ablation_id, blocks.c.lanes, blocks.c.back_ends, blocks.c.num_devices, blocks.c.num_nodes)
    waits = (blocks.c.node_class == node.node_class, SEVERAL, blocks.c.state == BlockState.QUEUED)
    may_run = (*waits, may_run_again(blocks.c.not_before), fits(node, room=None))
    query: Select[Any] = select(*columns).where(*may_run).distinct()
    rows = connection.execute(query).all()
    return [row for row in rows if len(companions(connection, node, row)) >= row.num_nodes - 1]


def companions(connection: Connection, node: Row[Any], block: Row[Any]) -> list[Row[Any]]:
    """Return the other nodes that may run `block` together with `node`, by name.

    They have the same devices and software, and take work.
    """
    needs = Needs(lanes=block.lanes, back_ends=block.back_ends, devices=block.num_devices, nodes=block.num_nodes)
    alike = (nodes.c.node_class == node.node_class, nodes.c.likeness == node.likeness, nodes.c.id != node.id)
    query = select(nodes).where(*alike, *TAKES_WORK, ~has_revoked_key(nodes.c.name)).order_by(nodes.c.name)
    return [row for row in connection.execute(query) if lacks(row, needs) is None]


def idle(connection: Connection, rows: Sequence[Row[Any]], *, idle_s: float) -> list[Row[Any]]:
    """Return those of the locked nodes `rows` that have no block and asked for one in the last `idle_s`."""
    ids = [row.id for row in rows]
    seen = select(nodes.c.id).where(nodes.c.id.in_(ids), nodes.c.seen_at > db_now() - idle_s)
    running = select(blocks.c.node_id).where(blocks.c.node_id.in_(ids), blocks.c.state == BlockState.RUNNING)
    places = select(members.c.node_id).where(members.c.node_id.in_(ids), *_HELD)
    free = set(connection.execute(seen).scalars())
    free -= {*connection.execute(running).scalars(), *connection.execute(places).scalars()}
    return [row for row in rows if row.id in free]


def add(
    connection: Connection, attempt_id: str, block_id: str, together: Sequence[Row[Any]], *, lease_s: float
) -> None:
    """Store the nodes of an attempt, number 0 first. The others have one lease to take their places."""
    shared = {"attempt_id": attempt_id, "block_id": block_id, "lease_until": db_now() + lease_s, "parts": "{}"}
    for number, node in enumerate(together):
        connection.execute(insert(members).values(**shared, number=number, node_id=node.id))


def nodes_of(connection: Connection, attempt_id: str, node_id: str) -> BlockNodes | None:
    """Return the nodes of an attempt as one of them receives them, None if it runs on one node."""
    query = select(members.c.node_id, nodes.c.name, nodes.c.meeting).join(nodes, nodes.c.id == members.c.node_id)
    rows = connection.execute(query.where(members.c.attempt_id == attempt_id).order_by(members.c.number)).all()
    if not rows:
        return None
    own = next(number for number, row in enumerate(rows) if row.node_id == node_id)
    return BlockNodes(own=own, all=tuple(BlockNode(name=row.name, meeting=row.meeting or "") for row in rows))


def number_of(connection: Connection, attempt_id: str, node_id: str) -> int:
    """Return the number of a node among those of an attempt; 0 on one node."""
    own = select(members.c.number).where(members.c.attempt_id == attempt_id, members.c.node_id == node_id)
    return connection.scalar(own) or 0


def exchange_parts(connection: Connection, locked: LockedAttempt, number: int, part: NodePart) -> tuple[NodePart, ...]:
    """Store the part of node `number` in a trial; return those of the other nodes in it. Raises Invalid."""
    attempt_id = locked.attempt.id
    if part.trial_id not in [row.id for row in locked.trials]:
        raise Invalid(f"trial {part.trial_id!r} is not part of block {locked.block.id}")
    query = select(members.c.number, members.c.parts).where(members.c.attempt_id == attempt_id)
    rows = connection.execute(query.order_by(members.c.number))
    stored = {row.number: json.loads(row.parts) for row in rows}
    if number not in stored:
        raise Invalid(f"block {locked.block.id} runs on one node, which has no part beside others")
    before = stored[number].get(part.trial_id)
    if before is None or not before["over"]:  # a heartbeat from before the end may arrive after it
        stored[number][part.trial_id] = part.model_dump(mode="json")
    own = update(members).where(members.c.attempt_id == attempt_id, members.c.number == number)
    connection.execute(own.values(parts=json.dumps(stored[number])))
    others = (parts.get(part.trial_id) for other, parts in stored.items() if other != number)
    return tuple(NodePart.model_validate_json(json.dumps(other)) for other in others if other is not None)


def renew_place(connection: Connection, block: Row[Any], number: int, *, lease_s: float) -> tuple[bool, float]:
    """Extend the lease of a place up to the block's limit; return what `attempts.renew_lease` returns.

    Raises StaleToken if the node has left the block.
    """
    until = db_now() + lease_s
    limit = blocks.c.limit_at
    most = select(case((limit < until, limit), else_=until)).where(blocks.c.id == block.id).scalar_subquery()
    own = (members.c.attempt_id == block.attempt_id, members.c.number == number, members.c.left_at.is_(None))
    renewed = update(members).where(*own).values(lease_until=most).returning(members.c.lease_until - db_now())
    left_s = connection.execute(renewed).scalar()
    if left_s is None:
        raise StaleToken(f"node number {number} of block {block.id} has left it; nothing was changed")
    state = connection.scalar(select(ablations.c.state).where(ablations.c.id == block.ablation_id))
    return state == AblationState.CANCELLING, max(0.0, left_s)


def leave(connection: Connection, attempt_id: str, number: int) -> None:
    """Note that the part of a node in the block is over: it is free for others."""
    own = (members.c.attempt_id == attempt_id, members.c.number == number)
    connection.execute(update(members).where(*own).values(left_at=db_now()))


def expire_place(connection: Connection, *, lease_s: float) -> tuple[str, str] | None:
    """End one attempt on several nodes in which the lease of a place ran out, as `attempts.expire_lease` does."""
    query = (
        select(members.c.attempt_id, members.c.number, members.c.claim_id, nodes.c.name)
        .join(blocks, blocks.c.id == members.c.block_id)
        .join(nodes, nodes.c.id == members.c.node_id)
        .where(*_HELD, has_passed(members.c.lease_until, longest_s=2 * lease_s + AHEAD_S))
        .order_by(members.c.lease_until)
        .limit(1)
    )
    place = connection.execute(query.with_for_update(of=blocks, skip_locked=True, key_share=True)).first()
    if place is None:
        return None
    same = (members.c.attempt_id == place.attempt_id, members.c.number == place.number)
    if connection.execute(query.where(*same)).first() is None:  # renewed before the lock
        return None
    locked = lock_block(connection, place.attempt_id)
    did = "was silent for longer than the lease of" if place.claim_id else "did not take"
    message = f"node '{place.name}' {did} its place beside node '{locked.attempt.node}'"
    failure = AttemptFailure(failure_class=FailureClass.INFRA_NODE, message=message)
    end_without_result(connection, locked, AttemptState.EXPIRED, failure, actor="reconciler")
    return locked.block.id, locked.block.node_id
