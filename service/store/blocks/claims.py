"""Claims: a queued block becomes a running one with a new attempt under a lease.

One compare-and-set gives a node the next block that fits it; `turns` says which is next, `attempts` what follows.
"""

import secrets
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, func, insert, select, true, update
from sqlalchemy.sql.dml import ReturningUpdate

from ablate.experiments.ids import new_id
from ablate.experiments.outcomes import AblationState, AttemptState, BlockState
from ablate.experiments.records.messages import PREPARATION_LIMIT_S
from ablate.service.errors import NodeBusy
from ablate.service.lifecycle import OutboxKind
from ablate.service.store import outbox
from ablate.service.store.blocks.transitions import Transitions
from ablate.service.store.blocks.turns import ORDER, WAITS, lock_place, take_turn
from ablate.service.store.nodes.placement import fits, may_run_again
from ablate.service.store.tables import ablations, attempts, blocks, db_now, nodes

BESIDE_TRIAL_S = 300.0
"""Time beside each trial of a block: a device to release, a report to send."""

_MAY_RUN = (blocks.c.state == BlockState.QUEUED, may_run_again(blocks.c.not_before))


def claim_block(
    connection: Connection,
    node: Row[Any],
    *,
    lease_s: float,
    claim_id: str | None = None,
    is_well: bool = True,
    left_s: float | None = None,
) -> str | None:
    """Give a node, which the caller has locked, the next block that fits it; return the id of the new attempt.

    With `left_s`, the seconds until the node's worker ends, it gets no block that should take longer.

    If one of the node's attempts comes from `claim_id`, renews its lease and returns it: the answer to that claim was
    lost. Returns None if no block waits, or if the node is stopped or not well. Raises NodeBusy if the node's
    blocks use all of its devices.
    """
    running = _running(connection, node)
    same = next((row for row in running if claim_id and row.token == _token(claim_id, row.attempt_id)), None)
    if same is not None:
        own = update(blocks).where(blocks.c.id == same.id, blocks.c.attempt_id == same.attempt_id)
        if connection.execute(own.values(lease_until=db_now() + lease_s)).rowcount:
            return str(same.attempt_id)
        running = _running(connection, node)  # it ended since the first look
    if not is_well:
        return None
    in_use, free = _devices(node, running)
    if node.draining or node.quarantined_reason is not None:
        return None
    attempt_id = new_id("att")
    fitting = (*_MAY_RUN, fits(node, room=free if in_use else None))
    in_time = true() if left_s is None else left_s >= TAKES_S
    block = _take(connection, _queue(node, fitting, in_time), node, fitting, attempt_id, lease_s=lease_s)
    if block is None:
        return None
    _record_claim(connection, block, attempt_id, node.id, _token(claim_id, attempt_id))
    return attempt_id


def _take(
    connection: Connection,
    queue: Select[Any],
    node: Row[Any],
    fitting: tuple[ColumnElement[bool], ...],
    attempt_id: str,
    *,
    lease_s: float,
) -> Row[Any] | None:
    """Take the fitting block whose turn it is.

    Pass over an ablation whose fitting blocks are all being claimed by others at this moment.
    """
    block = connection.execute(_taking(node, fitting, queue.scalar_subquery(), attempt_id, lease_s)).first()
    passed: list[str] = []
    while block is None:
        ablation_id = connection.scalar(queue.where(ablations.c.id.not_in(passed)))
        if ablation_id is None:
            return None
        block = connection.execute(_taking(node, fitting, ablation_id, attempt_id, lease_s)).first()
        passed.append(ablation_id)
    return block


def _queue(node: Row[Any], fitting: tuple[ColumnElement[bool], ...], in_time: ColumnElement[bool]) -> Select[Any]:
    """Return the query for the first ablation in the queue that is `in_time` and has a fitting block."""
    own = select(blocks.c.id).where(blocks.c.ablation_id == ablations.c.id, *fitting)
    waiting = select(ablations.c.id).where(ablations.c.node_class == node.node_class, WAITS, in_time)
    return waiting.where(own.correlate(ablations).exists()).order_by(*ORDER).limit(1).correlate(None)


def _taking(
    node: Row[Any],
    fitting: tuple[ColumnElement[bool], ...],
    ablation: ColumnElement[str] | str,
    attempt_id: str,
    lease_s: float,
) -> ReturningUpdate[Any]:
    """Return the compare-and-set that takes the first fitting block of an ablation that no other claim is taking."""
    first = select(blocks.c.id).where(blocks.c.ablation_id == ablation, *fitting)
    first = first.order_by(blocks.c["index"]).limit(1).with_for_update(skip_locked=True, key_share=True).correlate(None)
    values = {
        "state": BlockState.RUNNING,
        "attempt_no": blocks.c.attempt_no + 1,
        "attempt_id": attempt_id,
        "node_id": node.id,
        "lease_until": db_now() + lease_s,
        "limit_at": db_now() + _LIMIT_OF_BLOCK_S,
        "started_at": func.coalesce(blocks.c.started_at, db_now()),
        "message": None,
    }
    taken = update(blocks).where(blocks.c.id == first.scalar_subquery(), blocks.c.state == BlockState.QUEUED)
    return taken.values(values).returning(blocks.c.id, blocks.c.ablation_id, blocks.c.attempt_no)


_TRIALS_S = (ablations.c.trial_timeout_s + BESIDE_TRIAL_S) * ablations.c.trials_planned / ablations.c.blocks_planned
LIMIT_S: ColumnElement[Any] = PREPARATION_LIMIT_S + _TRIALS_S
"""How long an attempt may hold a block of an ablation, in seconds, regardless of heartbeats."""
_LIMIT_OF_BLOCK_S = select(LIMIT_S).where(ablations.c.id == blocks.c.ablation_id).scalar_subquery()
MEAN_S: ColumnElement[Any] = ablations.c.settled_s / func.nullif(ablations.c.blocks_done, 0)
"""Mean time of an ablation's finished blocks in seconds; null before the first."""
TAKES_S: ColumnElement[Any] = func.coalesce(MEAN_S, LIMIT_S)
"""How long a block should take at most, in seconds: a worker that ends earlier claims none."""


def _record_claim(connection: Connection, block: Row[Any], attempt_id: str, node_id: str, token: str) -> None:
    """Store the attempt, the ablation's turn and state, and the events of a claim."""
    place = lock_place(connection, block.ablation_id)
    transitions = Transitions(connection, block.ablation_id, actor=node_id, locked=AblationState(place.state))
    attempt = insert(attempts).values(
        id=attempt_id,
        block_id=block.id,
        ablation_id=block.ablation_id,
        node_id=node_id,
        token=token,
        number=block.attempt_no,
        state=AttemptState.RUNNING,
        started_at=db_now(),
    )
    connection.execute(attempt)
    reason = f"claimed, attempt {block.attempt_no}"
    transitions.add_moves([block.id], BlockState.QUEUED, BlockState.RUNNING, reason=reason)
    if place.state == AblationState.QUEUED:
        queued, running = AblationState.QUEUED, AblationState.RUNNING
        transitions.move([block.ablation_id], queued, running, reason="first block claimed", started_at=db_now())
        outbox.add(connection, OutboxKind.ANNOUNCE, block.ablation_id)
    take_turn(connection, transitions, place)
    transitions.flush()


def _token(claim_id: str | None, attempt_id: str) -> str:
    """Return a new attempt's token, which a claim with the same id recognises."""
    if claim_id is None:
        return secrets.token_urlsafe(16)
    return urlsafe_b64encode(sha256(f"{claim_id} {attempt_id}".encode()).digest()[:16]).rstrip(b"=").decode()


def _running(connection: Connection, node: Row[Any]) -> list[Row[Any]]:
    """Return the blocks that a node runs, each with its attempt's token."""
    query: Select[Any] = select(blocks.c.id, blocks.c.num_devices, blocks.c.attempt_id, attempts.c.token)
    query = query.join(attempts, attempts.c.id == blocks.c.attempt_id)
    own = query.where(blocks.c.node_id == node.id, blocks.c.state == BlockState.RUNNING)
    return list(connection.execute(own.order_by(blocks.c.id)))


def _devices(node: Row[Any], rows: Sequence[Row[Any]]) -> tuple[int, int]:
    """Return how many devices of a node its blocks use, and how many are free. Raises NodeBusy if none is."""
    devices = max(1, node.num_devices)
    in_use = sum(row.num_devices for row in rows)
    if in_use >= devices:
        raise NodeBusy(
            f"node {node.id} has {devices} device{'s' if devices > 1 else ''} and holds "
            f"{', '.join(row.id for row in rows)}; report or release first, or let the lease run out"
        )
    return in_use, devices - in_use


def waiting_node_classes(connection: Connection) -> list[str]:
    """Return the classes of nodes for which a block waits that may be claimed now."""
    own = select(blocks.c.id).where(blocks.c.ablation_id == ablations.c.id, *_MAY_RUN)
    waits = select(ablations.c.id).where(ablations.c.node_class == nodes.c.node_class, WAITS, own.exists())
    return list(connection.execute(select(nodes.c.node_class).where(waits.exists()).distinct()).scalars())
