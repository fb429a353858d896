"""Claiming a block: one compare-and-set under a lease, by priority and turn, for a node that takes work and fits."""

import secrets
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, func, insert, select, update

from experiments.ids import new_id
from experiments.outcomes import AblationState, AttemptState, BlockState
from service.errors import NodeBusy
from service.lifecycle import OutboxKind
from service.store import outbox
from service.store.columns import db_now
from service.store.placement import fits
from service.store.tables import ablations, attempts, blocks, nodes, trials
from service.store.transitions import Transitions
from service.store.turns import ORDER, WAITS, take_turn

BESIDE_TRIAL_S = 300.0
"""What a worker may need beside each trial of a block: data to prepare, a device to be released, a report to send."""

_MAY_RUN = (blocks.c.state == BlockState.QUEUED, blocks.c.not_before <= db_now())
_OF_ONE = select(blocks).where(*_MAY_RUN).order_by(blocks.c["index"]).limit(1).with_for_update(skip_locked=True)


def claim_block(connection: Connection, node: Row[Any], *, lease_s: float) -> str | None:
    """Give the next block that fits a node, which the caller has locked, to it.

    Returns the attempt's id, None when no block waits or the node is stopped. Raises NodeBusy when blocks that it holds
    have all of its devices.
    """
    in_use, room = _room(connection, node)
    if node.draining or node.quarantined_reason is not None:
        return None
    fitting = fits(node)
    if in_use:  # an idle node may also spread a step over more than it has, where devices are virtual
        fitting &= blocks.c.num_devices <= room
    block = _next(connection, node.node_class, fitting)
    return None if block is None else _give(connection, block, node.id, lease_s=lease_s)


def _next(connection: Connection, node_class: str, fitting: ColumnElement[bool]) -> Row[Any] | None:
    """Lock and return the block whose turn it is among the fitting ones.

    An ablation whose fitting blocks are all being claimed at this moment is passed over.
    """
    own = select(blocks.c.id).where(blocks.c.ablation_id == ablations.c.id, *_MAY_RUN, fitting)
    served = select(ablations.c.id).where(ablations.c.node_class == node_class, WAITS, own.exists()).order_by(*ORDER)
    passed: list[str] = []
    while (ablation_id := connection.scalar(served.where(ablations.c.id.not_in(passed)).limit(1))) is not None:
        block = connection.execute(_OF_ONE.where(blocks.c.ablation_id == ablation_id, fitting)).first()
        if block is not None:
            return block
        passed.append(ablation_id)
    return None


def _give(connection: Connection, block: Row[Any], node_id: str, *, lease_s: float) -> str:
    attempt_id = new_id("att")
    attempt_no = block.attempt_no + 1
    transitions = Transitions(connection, block.ablation_id, actor=node_id)
    transitions.move(
        [block.id],
        BlockState.QUEUED,
        BlockState.RUNNING,
        reason=f"claimed, attempt {attempt_no}",
        attempt_no=attempt_no,
        attempt_id=attempt_id,
        node_id=node_id,
        lease_until=db_now() + lease_s,
        limit_at=db_now() + _limit_s(block.ablation_id),
        started_at=func.coalesce(blocks.c.started_at, db_now()),
        message=None,
    )
    connection.execute(
        insert(attempts).values(
            id=attempt_id,
            block_id=block.id,
            ablation_id=block.ablation_id,
            token=secrets.token_urlsafe(16),
            number=attempt_no,
            node_id=node_id,
            state=AttemptState.RUNNING,
            started_at=db_now(),
        )
    )
    connection.execute(update(trials).where(trials.c.block_id == block.id).values(attempt_id=attempt_id))
    if transitions.lock() == AblationState.QUEUED:
        queued, running = AblationState.QUEUED, AblationState.RUNNING
        transitions.move([block.ablation_id], queued, running, reason="first block claimed", started_at=db_now())
        outbox.add(connection, OutboxKind.ANNOUNCE, block.ablation_id)
    take_turn(connection, transitions, block.ablation_id)
    transitions.flush()
    return attempt_id


def _room(connection: Connection, node: Row[Any]) -> tuple[int, int]:
    """Return how many devices of a node its blocks have, and how many are left. Raises NodeBusy when none is."""
    held = select(blocks.c.id, blocks.c.num_devices).where(
        blocks.c.node_id == node.id, blocks.c.state == BlockState.RUNNING
    )
    rows = connection.execute(held.order_by(blocks.c.id)).all()
    devices = max(1, node.num_devices)
    in_use = sum(row.num_devices for row in rows)
    if in_use >= devices:
        raise NodeBusy(
            f"node {node.id} has {devices} device{'s' if devices > 1 else ''} and holds "
            f"{', '.join(row.id for row in rows)}; report or release first, or let the lease run out"
        )
    return in_use, devices - in_use


def _limit_s(ablation_id: str) -> ColumnElement[float]:
    """Return how long an attempt at a block may hold it, however often its worker is heard."""
    each = (ablations.c.trial_timeout_s + BESIDE_TRIAL_S) * ablations.c.trials_planned / ablations.c.blocks_planned
    return select(each).where(ablations.c.id == ablation_id).scalar_subquery()


def waiting_node_classes(connection: Connection) -> list[str]:
    """Return the classes of nodes for which a block waits to be claimed now."""
    own = select(blocks.c.id).where(blocks.c.ablation_id == ablations.c.id, *_MAY_RUN)
    waits = select(ablations.c.id).where(ablations.c.node_class == nodes.c.node_class, WAITS, own.exists())
    return list(connection.execute(select(nodes.c.node_class).where(waits.exists()).distinct()).scalars())
