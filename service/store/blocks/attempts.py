"""An attempt's life under its lease: heartbeats, and the four ways it ends (done, broken, released, expired).

Every call carries the fencing token of the attempt. A lease that ran out but was not reassigned still counts: until the
reconciler has requeued the block, a late worker may go on or hand in its result.
"""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from sqlalchemy import Connection, Row, Select, bindparam, case, func, select, update

from experiments.outcomes import AblationState, AttemptState, BlockState, FailureClass, TrialState
from experiments.records.circumstances import AttemptRecord
from experiments.records.messages import TrialProgress
from experiments.retries import RETRY_RULES, Break, attempt_words, may_retry, retry_wait_s
from service.errors import Invalid, NotFound, StaleToken
from service.lifecycle import EventKind, OutboxKind
from service.store import outbox
from service.store.blocks.completion import complete_if_done
from service.store.blocks.transitions import Transitions
from service.store.blocks.turns import join_queue
from service.store.columns import db_now, storable
from service.store.nodes.nodes import check_owner
from service.store.nodes.placement import ELSEWHERE_S, works_elsewhere
from service.store.tables import ablations, attempts, blocks, nodes, trials

_BLOCK_INDEX = blocks.c["index"].label("block_index")
_BROKEN = (AttemptState.BROKEN, AttemptState.RELEASED, AttemptState.EXPIRED)


def _broken(*columns: Any) -> Select[Any]:
    query = select(*columns).select_from(attempts).join(blocks, blocks.c.id == attempts.c.block_id)
    query = query.where(attempts.c.ablation_id == bindparam("ablation"), attempts.c.state.in_(_BROKEN))
    return query.order_by(attempts.c.started_at, attempts.c.id)


_BREAKS = _broken(_BLOCK_INDEX, attempts.c.failure_class, attempts.c.arm)


def breaks_of(connection: Connection, ablation_id: str) -> tuple[Break, ...]:
    """Return every attempt of the ablation that broke, oldest first, for the rule of retries."""
    rows = connection.execute(_BREAKS, {"ablation": ablation_id})
    return tuple(Break(row.block_index, FailureClass(row.failure_class), row.arm) for row in rows)


def broken_attempts(connection: Connection, ablation_id: str) -> tuple[AttemptRecord, ...]:
    """Return every attempt of the ablation that broke, by block and number, for its verdict."""
    columns = (_BLOCK_INDEX, attempts.c.number, attempts.c.failure_class, attempts.c.arm, attempts.c.message)
    query = _broken(*columns, nodes.c.name).join(nodes, nodes.c.id == attempts.c.node_id)
    ordered = query.order_by(None).order_by(blocks.c["index"], attempts.c.number)
    return tuple(
        AttemptRecord(
            block_index=row.block_index,
            number=row.number,
            failure_class=FailureClass(row.failure_class),
            arm=row.arm,
            message=row.message,
            node=row.name,
        )
        for row in connection.execute(ordered, {"ablation": ablation_id})
    )


MAX_STEPS = 2**31 - 1

_OVER_LIMIT = (func.coalesce(blocks.c.limit_at, blocks.c.lease_until + 1) <= blocks.c.lease_until).label("over_limit")


@dataclass(frozen=True, kw_only=True)
class LockedAttempt:
    """A block and the attempt that holds it, locked."""

    connection: Connection
    attempt: SimpleNamespace
    """Its columns, as they were before the block was locked."""
    block: SimpleNamespace
    """Its columns."""
    node: str
    """Name of the attempt's node."""

    @cached_property
    def trials(self) -> Sequence[Row[Any]]:
        """The block's trials, by place; read when they are asked for, which most heartbeats do not."""
        return self.connection.execute(_TRIALS, {"block": self.block.id}).all()


@dataclass(frozen=True, kw_only=True)
class AttemptFailure:
    """Why an attempt ended without a result."""

    failure_class: FailureClass
    message: str
    arm: str | None = None
    """The arm whose trial ended it; None where it cannot be told."""


_TRIALS = select(trials).where(trials.c.block_id == bindparam("block")).order_by(trials.c.position)
_LOCK = (
    select(*attempts.c, *blocks.c, nodes.c.name)
    .join_from(attempts, blocks, blocks.c.id == attempts.c.block_id)
    .join(nodes, nodes.c.id == attempts.c.node_id)
    .where(attempts.c.id == bindparam("attempt"))
    .with_for_update(of=blocks)
)


def lock_attempt(connection: Connection, attempt_id: str, token: str) -> LockedAttempt:
    """Lock the block of an attempt for the worker that shows its token. Raises NotFound or StaleToken."""
    return held(lock_block(connection, attempt_id), token)


def lock_own(connection: Connection, attempt_id: str, token: str, *, owner: str | None) -> LockedAttempt:
    """Lock the block of an attempt for the worker that has the key of node `owner` and shows the attempt's token.

    Raises NotFound, Forbidden for another node's attempt, or StaleToken.
    """
    locked = lock_block(connection, attempt_id)
    check_owner(attempt_id, locked.node, owner)
    return held(locked, token)


def held(locked: LockedAttempt, token: str) -> LockedAttempt:
    """Return the attempt, of which the token was shown and which holds its block. Raises StaleToken."""
    _check_holder(locked.block, locked.attempt.id)
    check_token(locked.attempt, token)
    return locked


def lock_holder(connection: Connection, attempt_id: str) -> LockedAttempt:
    """Lock the block that an attempt still holds, for work of the service itself. Raises NotFound or StaleToken."""
    locked = lock_block(connection, attempt_id)
    _check_holder(locked.block, attempt_id)
    return locked


def lock_block(connection: Connection, attempt_id: str) -> LockedAttempt:
    """Lock the block of an attempt, whoever holds it. Raises NotFound."""
    row = connection.execute(_LOCK, {"attempt": attempt_id}).first()
    if row is None:
        raise _unknown(attempt_id)
    known = len(attempts.c)
    own = SimpleNamespace(**dict(zip(attempts.c.keys(), row[:known], strict=True)))
    block = SimpleNamespace(**dict(zip(blocks.c.keys(), row[known:-1], strict=True)))
    return LockedAttempt(connection=connection, attempt=own, block=block, node=row.name)


def check_holds(connection: Connection, attempt_id: str, token: str) -> None:
    """Raise StaleToken unless the attempt holds its block now; a look before work that a stale caller can be spared."""
    attempt = find_attempt(connection, attempt_id)
    _check_holder(connection.execute(select(blocks).where(blocks.c.id == attempt.block_id)).one(), attempt_id)
    check_token(attempt, token)


def _check_holder(block: Row[Any] | SimpleNamespace, attempt_id: str) -> None:
    if block.state != BlockState.RUNNING or block.attempt_id != attempt_id:
        raise StaleToken(
            f"attempt {attempt_id} does not hold block {block.id} (block {block.state}, "
            f"attempt {block.attempt_id or 'none'}); nothing was changed"
        )


def check_token(attempt: Row[Any] | SimpleNamespace, token: str) -> None:
    """Raise StaleToken unless `token` is the attempt's."""
    if not shows_token(attempt, token):
        raise StaleToken(f"attempt {attempt.id} has another token than the one that was sent; nothing was changed")


def shows_token(attempt: Row[Any] | SimpleNamespace, token: str) -> bool:
    """Tell whether `token` is the attempt's; nothing is that of an attempt which no worker of ours held."""
    return attempt.token is not None and secrets.compare_digest(attempt.token, token)


def find_attempt(connection: Connection, attempt_id: str) -> Row[Any]:
    """Return the attempt's row. Raises NotFound."""
    attempt = connection.execute(select(attempts).where(attempts.c.id == attempt_id)).first()
    if attempt is None:
        raise _unknown(attempt_id)
    return attempt


def _unknown(attempt_id: str) -> NotFound:
    return NotFound(f"there is no attempt {attempt_id!r}")


def block_state(connection: Connection, attempt_id: str) -> tuple[str, str]:
    """Return (block id, its state) of an attempt's block."""
    query = select(blocks.c.id, blocks.c.state).join(attempts, attempts.c.block_id == blocks.c.id)
    row = connection.execute(query.where(attempts.c.id == attempt_id)).one()
    return row.id, row.state


_UNTIL = db_now() + bindparam("lease_s")
_RENEW = (
    update(blocks)
    .where(blocks.c.id == bindparam("own"))
    .values(lease_until=case((blocks.c.limit_at < _UNTIL, blocks.c.limit_at), else_=_UNTIL))
    .returning(
        (blocks.c.limit_at - db_now()).label("limit_s"),
        select(ablations.c.state).where(ablations.c.id == bindparam("ablation")).scalar_subquery().label("state"),
    )
)


def renew_lease(connection: Connection, locked: LockedAttempt, *, lease_s: float) -> tuple[bool, float]:
    """Extend the lease up to the block's limit; return whether the worker is asked to stop, and what is left of it.

    The ablation is read, not locked: its workers do not wait for each other, and a cancellation that comes at this
    moment is told by the next heartbeat.
    """
    own = {"own": locked.block.id, "ablation": locked.block.ablation_id}
    row = connection.execute(_RENEW, {**own, "lease_s": lease_s})
    limit_s, now = row.one()
    return now == AblationState.CANCELLING, lease_s if limit_s is None else max(0.0, min(lease_s, limit_s))


def store_progress(connection: Connection, locked: LockedAttempt, progress: Sequence[TrialProgress]) -> None:
    """Store where trials of the block are, the one that runs named last, with an event for each that moved on."""
    if not progress:
        return
    known = {row.id: row for row in locked.trials}
    transitions = Transitions(connection, locked.block.ablation_id, actor=locked.attempt.node_id)
    for item in progress:
        row = known.get(item.trial_id)
        if row is None:
            raise Invalid(f"trial {item.trial_id!r} is not part of block {locked.block.id}")
        values, moments = _progress_values(item), _moments(row, item)
        if item is progress[-1] and not _ran_last(row, locked.trials):
            moments["runs_since"] = db_now()
        columns = {**values, **moments, "step_s": _finite(item.step_s)}
        if row.state == TrialState.QUEUED:
            transitions.move([row.id], TrialState.QUEUED, TrialState.RUNNING, reason="started", **columns)
        elif moments or row.steps_done != item.steps_done:
            connection.execute(update(trials).where(trials.c.id == row.id).values(**columns))
        if row.state != TrialState.QUEUED and row.steps_done != item.steps_done:
            transitions.add_event(EventKind.TRIAL_PROGRESS, row.id, reason="heartbeat", data=values)
    transitions.flush()


def _moments(row: Row[Any], item: TrialProgress) -> dict[str, Any]:
    """Return which moments of a trial are now."""
    now = {"started_at": row.started_at is None, "over_at": item.over and row.over_at is None}
    return {name: db_now() for name, happens in now.items() if happens}


def _ran_last(row: Row[Any], block: Sequence[Row[Any]]) -> bool:
    """Tell whether a trial was the last of its block that was heard to run."""
    since = [one.runs_since for one in block if one.runs_since is not None]
    return bool(since) and row.runs_since == max(since)


def _progress_values(item: TrialProgress) -> dict[str, Any]:
    if not 0 <= item.steps_done <= item.steps_total <= MAX_STEPS:
        raise Invalid(
            f"progress of trial {item.trial_id} is {item.steps_done} of {item.steps_total} steps; "
            f"allowed: 0 <= steps_done <= steps_total <= {MAX_STEPS}"
        )
    numbers = {"tokens_per_s": _finite(item.tokens_per_s), "loss": _finite(item.loss)}
    return {"steps_done": item.steps_done, "steps_total": item.steps_total, **numbers}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def end_without_result(
    connection: Connection,
    locked: LockedAttempt,
    state: AttemptState,
    failure: AttemptFailure,
    *,
    actor: str,
) -> BlockState:
    """End an attempt without a result: requeue its block whole, or fail or cancel it; return the block's state.

    A block fails when it had as many attempts as its failure class allows, and is cancelled with its ablation. Raises
    Invalid for an arm that the block does not hold.
    """
    block = locked.block
    _check_arm(locked, failure.arm)
    message = storable(failure.message)
    transitions = Transitions(connection, block.ablation_id, actor=actor)
    known = {"failure_class": failure.failure_class, "message": message, "arm": failure.arm}
    reason = f"{failure.failure_class}: {message}"
    transitions.move([locked.attempt.id], AttemptState.RUNNING, state, reason=reason, ended_at=db_now(), **known)
    broken = breaks_of(connection, block.ablation_id)
    last = Break(block.index, failure.failure_class, failure.arm)
    now, _ = BlockState.QUEUED, locked.trials  # read before others have to wait for the ablation
    if transitions.lock() == AblationState.CANCELLING:
        now = BlockState.CANCELLED
        _end(transitions, locked, now, TrialState.CANCELLED, "the ablation is being cancelled")
    elif not may_retry(broken, last):
        now, reason = BlockState.FAILED, f"{reason} ({attempt_words(broken, last)})"
        _end(transitions, locked, now, TrialState.FAILED, reason)
    else:
        _requeue(connection, transitions, locked, reason, broken=broken, last=last)
    complete_if_done(connection, block.ablation_id, transitions.flush())
    return now


def _check_arm(locked: LockedAttempt, arm: str | None) -> None:
    if arm is None:
        return
    known = sorted(row.arm for row in locked.trials)
    if arm not in known:
        raise Invalid(f"arm {arm!r} is not part of block {locked.block.id}; its arms: {', '.join(known)}")


_OF_AN_ATTEMPT = ("steps_done", "tokens_per_s", "loss", "step_s", "started_at", "over_at", "runs_since")
"""Columns of a trial that are forgotten when its block goes back to the queue."""


def _requeue(
    connection: Connection,
    transitions: Transitions,
    locked: LockedAttempt,
    reason: str,
    *,
    broken: Sequence[Break],
    last: Break,
) -> None:
    block = locked.block
    cleared = dict.fromkeys(_OF_AN_ATTEMPT)
    started = [row.id for row in locked.trials if row.state == TrialState.RUNNING]
    transitions.move(started, TrialState.RUNNING, TrialState.QUEUED, reason=reason, **cleared)
    transitions.move(
        [block.id],
        BlockState.RUNNING,
        BlockState.QUEUED,
        reason=reason,
        attempt_id=None,
        node_id=None,
        lease_until=None,
        limit_at=None,
        not_before=db_now() + retry_wait_s(broken, last),
        avoid_node_id=_avoided(connection, block, last.failure_class),
        avoid_until=db_now() + ELSEWHERE_S,
        message=reason,
    )
    join_queue(transitions)
    transitions.add_row(outbox.NEW, outbox.row(OutboxKind.WAKE, block.node_class))


def _avoided(connection: Connection, block: SimpleNamespace, failure: FailureClass) -> str | None:
    """Return the node that should not get a broken block again: the last one, if another one takes work."""
    elsewhere = RETRY_RULES[failure].elsewhere and works_elsewhere(connection, block.node_id, block.node_class)
    return block.node_id if elsewhere else None


def _end(
    transitions: Transitions, locked: LockedAttempt, block_state: BlockState, trial_state: TrialState, reason: str
) -> None:
    for state in (TrialState.QUEUED, TrialState.RUNNING):
        transitions.move([r.id for r in locked.trials if r.state == state], state, trial_state, reason=reason)
    ending = {"lease_until": None, "limit_at": None, "finished_at": db_now(), "message": reason}
    transitions.move([locked.block.id], BlockState.RUNNING, block_state, reason=reason, **ending)


def expire_lease(connection: Connection) -> tuple[str, str] | None:
    """Take one block back whose lease ran out: its worker was silent, or held it for longer than it may.

    Returns the ids of block and node; None when there is none.
    """
    silent = select(blocks.c.id, blocks.c.attempt_id, blocks.c.node_id, _OVER_LIMIT).where(
        blocks.c.state == BlockState.RUNNING, blocks.c.lease_until < db_now()
    )
    row = connection.execute(silent.order_by(blocks.c.lease_until).limit(1).with_for_update(skip_locked=True)).first()
    if row is None:
        return None
    locked = lock_holder(connection, row.attempt_id)
    what = "held the block for longer than its limit" if row.over_limit else "was silent for longer than its lease"
    name = connection.execute(select(nodes.c.name).where(nodes.c.id == row.node_id)).scalar_one()
    message = f"node '{name}' {what}{_while(locked)}"
    failure = AttemptFailure(failure_class=FailureClass.INFRA_NODE, message=message)
    end_without_result(connection, locked, AttemptState.EXPIRED, failure, actor="reconciler")
    return row.id, row.node_id


def _while(locked: LockedAttempt) -> str:
    """Say which arm ran last: it need not be the reason."""
    ran = [row.arm for row in locked.trials if row.state == TrialState.RUNNING]
    return f" while arm '{ran[-1]}' ran" if ran else ""
