"""Claiming a block: one compare-and-set under a lease, by priority and turn, for a node that takes work and fits."""

import secrets
from functools import lru_cache
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, bindparam, func, select, update
from sqlalchemy.sql.dml import ReturningUpdate

from experiments.ids import new_id
from experiments.outcomes import AblationState, AttemptState, BlockState
from service.errors import NodeBusy
from service.lifecycle import OutboxKind
from service.store import outbox
from service.store.blocks.transitions import Transitions
from service.store.blocks.turns import ORDER, WAITS, lock_place, take_turn
from service.store.columns import db_now
from service.store.inserts import Target
from service.store.nodes.placement import NODE_ID, Fits
from service.store.tables import ablations, attempts, blocks, nodes

BESIDE_TRIAL_S = 300.0
"""What a worker may need beside each trial of a block: data to prepare, a device to be released, a report to send."""

_MAY_RUN = (blocks.c.state == BlockState.QUEUED, blocks.c.not_before <= db_now())
_ATTEMPT = Target(table=attempts, made={"started_at": db_now()})
_KEPT_STATEMENTS = 256


def claim_block(connection: Connection, node: Row[Any], *, lease_s: float) -> str | None:
    """Give the next block that fits a node, which the caller has locked, to it.

    Returns the attempt's id, None when no block waits or the node is stopped. Raises NodeBusy when blocks that it holds
    have all of its devices.
    """
    in_use, room = _room(connection, node)
    if node.draining or node.quarantined_reason is not None:
        return None
    attempt_id = new_id("att")
    fits = Fits(node.node_class, node.num_devices, node.lanes, room if in_use else None)
    held = {"to_node": node.id, "to_attempt": attempt_id, "lease_s": lease_s}
    block = _take(connection, fits, held)
    if block is None:
        return None
    _note(connection, block, attempt_id, node.id)
    return attempt_id


def _take(connection: Connection, fits: Fits, held: dict[str, Any]) -> Row[Any] | None:
    """Give the fitting block whose turn it is out and return it.

    An ablation whose fitting blocks are all being claimed at this moment is passed over.
    """
    block = connection.execute(_taking_first(fits), held).first()
    passed: list[str] = []
    while block is None and (ablation_id := connection.scalar(_served(fits), {**held, "passed": passed})) is not None:
        block = connection.execute(_taking_of(fits), {**held, "of": ablation_id}).first()
        passed.append(ablation_id)
    return block


# The statements are built once for every kind of node: to build them costs more than to run them.


@lru_cache(maxsize=_KEPT_STATEMENTS)
def _taking_first(fits: Fits) -> ReturningUpdate[Any]:
    return _taking(fits, _queue(fits).limit(1).scalar_subquery())


@lru_cache(maxsize=_KEPT_STATEMENTS)
def _taking_of(fits: Fits) -> ReturningUpdate[Any]:
    return _taking(fits, bindparam("of", type_=ablations.c.id.type))


@lru_cache(maxsize=_KEPT_STATEMENTS)
def _served(fits: Fits) -> Select[Any]:
    return _queue(fits).where(ablations.c.id.not_in(bindparam("passed", expanding=True))).limit(1)


def _queue(fits: Fits) -> Select[Any]:
    """Return the ablations that have a block for a node of this kind, in the order in which they are served."""
    own = select(blocks.c.id).where(blocks.c.ablation_id == ablations.c.id, *_MAY_RUN, fits.condition)
    waiting = select(ablations.c.id).where(ablations.c.node_class == fits.node_class, WAITS)
    return waiting.where(own.correlate(ablations).exists()).order_by(*ORDER).correlate(None)


def _taking(fits: Fits, ablation: ColumnElement[str]) -> ReturningUpdate[Any]:
    """Return the compare-and-set that gives out the first fitting block of an ablation that nobody else is taking."""
    first = select(blocks.c.id).where(blocks.c.ablation_id == ablation, *_MAY_RUN, fits.condition)
    first = first.order_by(blocks.c["index"]).limit(1).with_for_update(skip_locked=True).correlate(None)
    values = {
        "state": BlockState.RUNNING,
        "attempt_no": blocks.c.attempt_no + 1,
        "attempt_id": bindparam("to_attempt"),
        "node_id": NODE_ID,
        "lease_until": db_now() + bindparam("lease_s"),
        "limit_at": db_now() + _LIMIT_S,
        "started_at": func.coalesce(blocks.c.started_at, db_now()),
        "message": None,
    }
    taken = update(blocks).where(blocks.c.id == first.scalar_subquery(), blocks.c.state == BlockState.QUEUED)
    return taken.values(values).returning(blocks.c.id, blocks.c.ablation_id, blocks.c.attempt_no)


_LIMIT_S = (
    select((ablations.c.trial_timeout_s + BESIDE_TRIAL_S) * ablations.c.trials_planned / ablations.c.blocks_planned)
    .where(ablations.c.id == blocks.c.ablation_id)
    .scalar_subquery()
)
"""How long an attempt at a block may hold it, however often its worker is heard."""


def _note(connection: Connection, block: Row[Any], attempt_id: str, node_id: str) -> None:
    """Write what follows from a block that was given out: the attempt, the ablation's turn and state, events."""
    place = lock_place(connection, block.ablation_id)
    transitions = Transitions(connection, block.ablation_id, actor=node_id, locked=AblationState(place.state))
    attempt = {"id": attempt_id, "block_id": block.id, "ablation_id": block.ablation_id, "node_id": node_id}
    own = {"token": secrets.token_urlsafe(16), "number": block.attempt_no, "state": AttemptState.RUNNING}
    transitions.add_row(_ATTEMPT, {**attempt, **own})
    reason = f"claimed, attempt {block.attempt_no}"
    transitions.add_moves([block.id], BlockState.QUEUED, BlockState.RUNNING, reason=reason)
    if place.state == AblationState.QUEUED:
        queued, running = AblationState.QUEUED, AblationState.RUNNING
        transitions.move([block.ablation_id], queued, running, reason="first block claimed", started_at=db_now())
        transitions.add_row(outbox.NEW, outbox.row(OutboxKind.ANNOUNCE, block.ablation_id))
    take_turn(transitions, place)
    transitions.flush()


_HELD = (
    select(blocks.c.id, blocks.c.num_devices)
    .where(blocks.c.node_id == bindparam("holder"), blocks.c.state == BlockState.RUNNING)
    .order_by(blocks.c.id)
)


def _room(connection: Connection, node: Row[Any]) -> tuple[int, int]:
    """Return how many devices of a node its blocks have, and how many are left. Raises NodeBusy when none is."""
    rows = connection.execute(_HELD, {"holder": node.id}).all()
    devices = max(1, node.num_devices)
    in_use = sum(row.num_devices for row in rows)
    if in_use >= devices:
        raise NodeBusy(
            f"node {node.id} has {devices} device{'s' if devices > 1 else ''} and holds "
            f"{', '.join(row.id for row in rows)}; report or release first, or let the lease run out"
        )
    return in_use, devices - in_use


def waiting_node_classes(connection: Connection) -> list[str]:
    """Return the classes of nodes for which a block waits to be claimed now."""
    own = select(blocks.c.id).where(blocks.c.ablation_id == ablations.c.id, *_MAY_RUN)
    waits = select(ablations.c.id).where(ablations.c.node_class == nodes.c.node_class, WAITS, own.exists())
    return list(connection.execute(select(nodes.c.node_class).where(waits.exists()).distinct()).scalars())
