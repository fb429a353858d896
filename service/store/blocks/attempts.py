"""An attempt under its lease: heartbeats, and every end without a result (broken, expired).

Starts after `claims`; an attempt with a result goes to `reports`. Each call shows the attempt's token, so a worker that
lost its block changes nothing. A lease that ran out counts until the reconciler requeues the block.
"""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, case, delete, select, update

from ablate.experiments.outcomes import AblationState, AttemptState, BlockState, FailureClass, TrialState
from ablate.experiments.records.circumstances import AttemptRecord
from ablate.experiments.records.messages import TrialProgress
from ablate.experiments.retries import Break, attempt_words, may_retry, retry_wait_s
from ablate.service.errors import Invalid, NotFound, StaleToken
from ablate.service.lifecycle import EventKind, OutboxKind
from ablate.service.store import outbox
from ablate.service.store.blocks.completion import complete_if_done
from ablate.service.store.blocks.transitions import Transitions
from ablate.service.store.blocks.turns import join_queue
from ablate.service.store.nodes.placement import ELSEWHERE_S, works_elsewhere
from ablate.service.store.tables import ablations, attempts, blocks, db_now, events, has_passed, nodes, storable, trials

MAX_STEPS = 2**31 - 1
AHEAD_S = 600.0
"""A lease further ahead than twice its length and this time is of a clock that was set back."""
WITHOUT_RESULT = (AttemptState.BROKEN, AttemptState.EXPIRED)
"""Ends of an attempt that leave no receipts."""
_INDEX = blocks.c["index"].label("block_index")


@dataclass(frozen=True, kw_only=True)
class LockedAttempt:
    """A locked block with the attempt that runs it."""

    attempt: Row[Any]
    """Its columns, and the name of its node as `node`."""
    block: Row[Any]
    """Its columns, and its index as `block_index`."""
    trials: Sequence[Row[Any]]
    """The trials of the block, by position."""


@dataclass(frozen=True, kw_only=True)
class AttemptFailure:
    """Why an attempt ended without a result."""

    failure_class: FailureClass
    message: str
    arm: str | None = None
    """The arm whose trial ended it; None if no trial can be named."""


def lock_attempt(connection: Connection, attempt_id: str, token: str) -> LockedAttempt:
    """Lock the block of an attempt for the worker that shows its token. Raises NotFound or StaleToken."""
    locked = lock_block(connection, attempt_id)
    check_holder(locked.attempt, locked.block)
    check_token(locked.attempt, token)
    return locked


def lock_block(connection: Connection, attempt_id: str) -> LockedAttempt:
    """Lock the block of an attempt, whichever attempt runs it. Raises NotFound."""
    own = select(blocks, _INDEX).join(attempts, attempts.c.block_id == blocks.c.id).where(attempts.c.id == attempt_id)
    block = connection.execute(own.with_for_update(of=blocks, key_share=True)).first()
    attempt = find_attempt(connection, attempt_id)
    assert block is not None  # noqa: S101  # an attempt refers to its block
    own_trials = select(trials).where(trials.c.block_id == block.id).order_by(trials.c.position)
    return LockedAttempt(attempt=attempt, block=block, trials=connection.execute(own_trials).all())


def find_attempt(connection: Connection, attempt_id: str) -> Row[Any]:
    """Return the attempt's row with the name of its node as `node`. Raises NotFound."""
    query = select(attempts, nodes.c.name.label("node")).join(nodes, nodes.c.id == attempts.c.node_id)
    attempt = connection.execute(query.where(attempts.c.id == attempt_id)).first()
    if attempt is None:
        raise NotFound(f"there is no attempt {attempt_id!r}")
    return attempt


def block_of(connection: Connection, attempt: Row[Any]) -> Row[Any]:
    """Return the row of an attempt's block, without locking it."""
    return connection.execute(select(blocks).where(blocks.c.id == attempt.block_id)).one()


def check_holder(attempt: Row[Any], block: Row[Any]) -> None:
    """Raise StaleToken unless the attempt runs the block now."""
    if block.state != BlockState.RUNNING or block.attempt_id != attempt.id:
        raise StaleToken(
            f"attempt {attempt.id} does not hold block {block.id} (block {block.state}, "
            f"attempt {block.attempt_id or 'none'}); nothing was changed"
        )


def check_token(attempt: Row[Any], token: str) -> None:
    """Raise StaleToken unless `token` is the attempt's."""
    if not has_token(attempt, token):
        raise StaleToken(f"attempt {attempt.id} has another token than the one that was sent; nothing was changed")


def has_token(attempt: Row[Any], token: str) -> bool:
    """Return whether `token` is the attempt's; an imported attempt has none."""
    return attempt.token is not None and secrets.compare_digest(attempt.token, token)


def renew_lease(connection: Connection, locked: LockedAttempt, *, lease_s: float) -> tuple[bool, float]:
    """Extend the lease up to the block's limit; return whether the worker should stop, and the seconds it now has.

    Reads the ablation without locking it, so its workers do not wait for each other. The next heartbeat reports a
    cancellation that comes at this moment. If the database's clock was set since the last renewal, the attempt's start
    and the block's limit move with it.
    """
    until = db_now() + lease_s
    renewed = (
        update(blocks)
        .where(blocks.c.id == locked.block.id)
        .values(lease_until=case((blocks.c.limit_at < until, blocks.c.limit_at), else_=until))
        .returning((blocks.c.limit_at - db_now()).label("limit_s"), db_now().label("now"))
    )
    limit_s, now = connection.execute(renewed).one()
    step_s = _clock_step_s(locked.block, now, lease_s=lease_s)
    if step_s:
        _move_times(connection, locked, step_s)
        limit_s, _ = connection.execute(renewed).one()
    state = connection.scalar(select(ablations.c.state).where(ablations.c.id == locked.block.ablation_id))
    return state == AblationState.CANCELLING, lease_s if limit_s is None else max(0.0, min(lease_s, limit_s))


def _clock_step_s(block: Row[Any], now: float, *, lease_s: float) -> float:
    """Return by how much more than a lease the clock moved since the last renewal, or how far it went back.

    A lease that the block's limit cut says nothing about its renewal.
    """
    if block.limit_at is not None and block.limit_at <= block.lease_until:
        return 0.0
    since_s = now - (block.lease_until - lease_s)
    return float(since_s - min(max(since_s, 0.0), lease_s))


def _move_times(connection: Connection, locked: LockedAttempt, step_s: float) -> None:
    own_block, own_attempt = blocks.c.id == locked.block.id, attempts.c.id == locked.attempt.id
    connection.execute(update(blocks).where(own_block).values(limit_at=blocks.c.limit_at + step_s))
    connection.execute(update(attempts).where(own_attempt).values(started_at=attempts.c.started_at + step_s))


def end_moment(lease_until: float, started_at: float) -> ColumnElement[float]:
    """Return when an attempt that ends now ended: not after its lease, and not before its start.

    The database's clock may have been set meanwhile, and a silent worker used nothing after its lease.
    """
    latest = max(lease_until, started_at)
    return case((db_now() > latest, latest), (db_now() < started_at, started_at), else_=db_now())


def store_waiting(connection: Connection, locked: LockedAttempt, waits_for: str | None) -> None:
    """Store what a running block waits for on its node, with an event when it begins or ends to wait."""
    text = None if waits_for is None else storable(waits_for)
    block = locked.block
    if block.message == text:
        return
    connection.execute(update(blocks).where(blocks.c.id == block.id).values(message=text))
    if (block.message is None) != (text is None):
        transitions = Transitions(connection, block.ablation_id, actor=locked.attempt.node_id)
        reason = "waits no more" if text is None else f"waits for {text}"
        transitions.add_event(EventKind.BLOCK_WAITS, block.id, reason=reason)
        transitions.flush()


def store_progress(connection: Connection, locked: LockedAttempt, progress: Sequence[TrialProgress]) -> None:
    """Store the progress of the block's trials, the running one last, with an event for each that moved on."""
    if not progress:
        return
    rows = {row.id: row for row in locked.trials}
    transitions = Transitions(connection, locked.block.ablation_id, actor=locked.attempt.node_id)
    for item in progress:
        row = rows.get(item.trial_id)
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
        failure = {"failure": storable(item.failure)} if item.failure and "over_at" in moments else {}
        if failure or (row.state != TrialState.QUEUED and row.steps_done != item.steps_done):
            transitions.add_event(EventKind.TRIAL_PROGRESS, row.id, reason="heartbeat", data=values | failure)
    transitions.flush()


def forget_progress(connection: Connection, locked: LockedAttempt) -> None:
    """Delete the progress of an attempt that ended, so that a curve never has the steps of two attempts."""
    of_trials = (events.c.subject.in_([row.id for row in locked.trials]), events.c.kind == EventKind.TRIAL_PROGRESS)
    connection.execute(delete(events).where(*of_trials))


def _moments(row: Row[Any], item: TrialProgress) -> dict[str, Any]:
    """Return the time columns of a trial that this heartbeat sets."""
    now = {"started_at": row.started_at is None, "over_at": item.over and row.over_at is None}
    return {name: db_now() for name, happens in now.items() if happens}


def _ran_last(row: Row[Any], block: Sequence[Row[Any]]) -> bool:
    """Return whether the previous heartbeat named this trial of its block as the running one."""
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


def expire_lease(connection: Connection, *, lease_s: float = math.inf) -> tuple[str, str] | None:
    """End one attempt whose lease ran out: its worker was silent, or had the block for longer than its limit.

    A lease that ends far more than `lease_s` ahead was stored before the database's clock was set back, so it also ran
    out. Returns the ids of block and node, None if no lease ran out.
    """
    until = blocks.c.lease_until
    over = until < db_now() if math.isinf(lease_s) else has_passed(until, longest_s=2 * lease_s + AHEAD_S)
    lapsed = select(blocks.c.attempt_id).where(blocks.c.state == BlockState.RUNNING, over)
    attempt_id = connection.scalar(
        lapsed.order_by(blocks.c.lease_until).limit(1).with_for_update(skip_locked=True, key_share=True)
    )
    if attempt_id is None:
        return None
    locked = lock_block(connection, attempt_id)
    block, name = locked.block, locked.attempt.node
    over_limit = block.limit_at is not None and block.limit_at <= block.lease_until
    reason = "held the block for longer than its limit" if over_limit else "was silent for longer than its lease"
    arm = _running_arm(locked.trials)
    last = "" if arm is None else f" while arm '{arm}' ran"
    failure = AttemptFailure(failure_class=FailureClass.INFRA_NODE, message=f"node '{name}' {reason}{last}", arm=arm)
    end_without_result(connection, locked, AttemptState.EXPIRED, failure, actor="reconciler")
    return block.id, block.node_id


def _running_arm(block: Sequence[Row[Any]]) -> str | None:
    """Return the arm that the last heartbeat named as running; None without one, or if its process had ended."""
    started = [row for row in block if row.runs_since is not None]
    last = max(started, key=lambda row: row.runs_since, default=None)
    return None if last is None or last.over_at is not None else last.arm


def end_without_result(
    connection: Connection,
    locked: LockedAttempt,
    state: AttemptState,
    failure: AttemptFailure,
    *,
    actor: str,
) -> BlockState:
    """End an attempt without a result; return the new state of its block.

    experiments/retries.py decides whether the block is queued again, whole, or fails. It is cancelled if its ablation
    is. Raises Invalid if the block does not have the arm of `failure`.
    """
    block = locked.block
    _check_arm(locked, failure.arm)
    message = storable(failure.message)
    transitions = Transitions(connection, block.ablation_id, actor=actor)
    values = {"failure_class": failure.failure_class, "message": message, "arm": failure.arm}
    reason = f"{failure.failure_class}: {message}"
    ended_at = end_moment(block.lease_until, locked.attempt.started_at)
    transitions.move([locked.attempt.id], AttemptState.RUNNING, state, reason=reason, ended_at=ended_at, **values)
    broken = breaks_of(connection, block.ablation_id)
    last = Break(block.block_index, failure.failure_class, failure.arm)
    if transitions.lock() == AblationState.CANCELLING:
        ended = BlockState.CANCELLED
        _end(transitions, locked, ended, TrialState.CANCELLED, "the ablation is being cancelled")
    elif may_retry(broken, last):
        ended = BlockState.QUEUED
        _requeue(connection, transitions, locked, reason, rest_s=retry_wait_s(broken, last), last=last)
    else:
        ended = BlockState.FAILED
        _end(transitions, locked, ended, TrialState.FAILED, f"{reason} ({attempt_words(broken, last)})")
    transitions.flush()
    forget_progress(connection, locked)
    complete_if_done(connection, block.ablation_id)
    return ended


def _check_arm(locked: LockedAttempt, arm: str | None) -> None:
    arms = sorted(row.arm for row in locked.trials)
    if arm is not None and arm not in arms:
        raise Invalid(f"arm {arm!r} is not part of block {locked.block.id}; its arms: {', '.join(arms)}")


_PROGRESS = ("steps_done", "tokens_per_s", "loss", "step_s", "started_at", "over_at", "runs_since")
"""Columns of a trial that are cleared when its block goes back to the queue."""


def _requeue(
    connection: Connection, transitions: Transitions, locked: LockedAttempt, reason: str, *, rest_s: float, last: Break
) -> None:
    block = locked.block
    started = [row.id for row in locked.trials if row.state == TrialState.RUNNING]
    transitions.move(started, TrialState.RUNNING, TrialState.QUEUED, reason=reason, **dict.fromkeys(_PROGRESS))
    transitions.move(
        [block.id],
        BlockState.RUNNING,
        BlockState.QUEUED,
        reason=reason,
        attempt_id=None,
        node_id=None,
        lease_until=None,
        limit_at=None,
        not_before=db_now() + rest_s,
        avoid_node_id=_avoided(connection, block, last.failure_class),
        avoid_until=db_now() + ELSEWHERE_S,
        message=reason,
    )
    join_queue(transitions)
    outbox.add(connection, OutboxKind.WAKE, block.node_class)


def _avoided(connection: Connection, block: Row[Any], failure: FailureClass) -> str | None:
    """Return the node that should not get a broken block again: the last one, if another one takes work."""
    elsewhere = failure.rule.elsewhere and works_elsewhere(connection, block.node_id, block.node_class)
    return block.node_id if elsewhere else None


def _end(
    transitions: Transitions, locked: LockedAttempt, block_state: BlockState, trial_state: TrialState, reason: str
) -> None:
    for state in (TrialState.QUEUED, TrialState.RUNNING):
        transitions.move([r.id for r in locked.trials if r.state == state], state, trial_state, reason=reason)
    values = {"lease_until": None, "limit_at": None, "finished_at": db_now(), "message": reason}
    transitions.move([locked.block.id], BlockState.RUNNING, block_state, reason=reason, **values)


def _broken(ablation_id: str, *columns: Any) -> Select[Any]:
    query = select(_INDEX, attempts.c.failure_class, attempts.c.arm, *columns).select_from(attempts)
    query = query.join(blocks, blocks.c.id == attempts.c.block_id)
    return query.where(attempts.c.ablation_id == ablation_id, attempts.c.state.in_(WITHOUT_RESULT))


def breaks_of(connection: Connection, ablation_id: str) -> tuple[Break, ...]:
    """Return every attempt of the ablation that ended without a result, oldest first, for the rule of retries."""
    rows = connection.execute(_broken(ablation_id).order_by(attempts.c.started_at, attempts.c.id))
    return tuple(Break(row.block_index, FailureClass(row.failure_class), row.arm) for row in rows)


def broken_attempts(connection: Connection, ablation_id: str) -> tuple[AttemptRecord, ...]:
    """Return every attempt of the ablation that ended without a result, by block and number, for its verdict."""
    query = _broken(ablation_id, attempts.c.number, attempts.c.message, attempts.c.state, nodes.c.name)
    query = query.join(nodes, nodes.c.id == attempts.c.node_id)
    return tuple(
        AttemptRecord(
            block_index=row.block_index,
            number=row.number,
            failure_class=FailureClass(row.failure_class),
            arm=row.arm,
            message=row.message,
            node=row.name,
            vanished=row.state == AttemptState.EXPIRED,
        )
        for row in connection.execute(query.order_by(blocks.c["index"], attempts.c.number))
    )
