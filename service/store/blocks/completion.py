"""The end of an ablation: its last block, a first block that compares nothing, a spent budget or a cancellation.

Every step that ends a block calls `complete_if_done`, which moves the ablation on and asks for its verdict or report.
"""

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select, case, func, select

from ablate.experiments.outcomes import (
    BASELINE,
    VARIANT,
    AblationState,
    AttemptState,
    BlockState,
    FailureClass,
    Outcome,
    TrialState,
)
from ablate.experiments.reporting import wording
from ablate.experiments.retries import TrialEnd, budget_spent, nothing_to_compare
from ablate.service.lifecycle import OVER, OutboxKind
from ablate.service.store import outbox
from ablate.service.store.blocks.transitions import Transitions
from ablate.service.store.nodes.placement import BUSY_DEVICES
from ablate.service.store.tables import ablations, attempts, blocks, db_now, receipts, trials

NOT_SHOWN: dict[str, None] = {"mlflow_experiment_id": None, "mlflow_run_id": None}
"""Columns of an ablation that MLflow does not show, or not in full."""
_NAMED_ARMS = 3
"""Arms without measurements that an event names, each with an outcome."""
_REASON_CHARACTERS = 200


def complete_if_done(connection: Connection, ablation_id: str) -> None:
    """Move the ablation on if none of its blocks is left to run.

    Reads the ablation's counters, so the cost does not grow with the number of its blocks.
    """
    row = _lock_counters(connection, ablation_id)
    if row.state in OVER:
        return
    if _stop_early(connection, row):
        row = _lock_counters(connection, ablation_id)
    if row.blocks_queued + row.blocks_running == 0:
        if row.blocks_held == 0:
            _end(connection, row)
        else:
            outbox.add(connection, OutboxKind.LOOK, ablation_id)


def _lock_counters(connection: Connection, ablation_id: str) -> Row[Any]:
    """Lock an ablation; return its state, counters and budget, and the `devices` that one of its blocks uses."""
    first = select(BUSY_DEVICES).where(blocks.c.ablation_id == ablation_id, blocks.c["index"] == 0)
    columns = ("id", "state", "device_s", "device_minutes", *(f"blocks_{state}" for state in BlockState))
    query: Select[Any] = select(*(ablations.c[name] for name in columns), first.scalar_subquery().label("devices"))
    return connection.execute(query.where(ablations.c.id == ablation_id).with_for_update(key_share=True)).one()


def _stop_early(connection: Connection, row: Row[Any]) -> bool:
    """Cancel the waiting blocks once the device minutes are used up, or the first block leaves nothing to compare.

    Skips a block that is being claimed at this moment, because blocks are locked before their ablation. Returns whether
    there is such a reason while blocks wait.
    """
    if row.blocks_queued + row.blocks_held == 0:
        return False
    used_minutes = row.devices * row.device_s / 60  # of broken attempts, too
    reason = budget_spent(used_minutes, row.device_minutes) or _first_block_problem(connection, row)
    if reason is None:
        return False
    transitions = Transitions(connection, row.id, actor="service", locked=AblationState(row.state))
    cancel_blocks(connection, transitions, row.id, lock_waiting(connection, row.id, wait=False), reason=reason)
    transitions.flush()
    return True


def _first_block_problem(connection: Connection, row: Row[Any]) -> str | None:
    """Return why the first block to end leaves nothing to compare; None if it does not, or is not the only one."""
    if row.blocks_done == 0 and row.blocks_failed == 1:
        return _unprepared(connection, row.id)
    if row.blocks_done != 1:
        return None
    payload = case((trials.c.outcome != Outcome.MEASURED, receipts.c.payload)).label("payload")  # others are large
    query = select(trials.c.arm, trials.c.role, trials.c.outcome, payload)
    query = query.join(receipts, trials.c.id == receipts.c.trial_id).where(trials.c.ablation_id == row.id)
    ends = connection.execute(query.order_by(trials.c.position)).all()
    messages = ["" if end.payload is None else str(json.loads(end.payload)["message"]) for end in ends]
    problem = nothing_to_compare([TrialEnd(*end[:3], own) for end, own in zip(ends, messages, strict=True)])
    return None if problem is None else f"{problem[0]}: {wording.shorten(problem[1], _REASON_CHARACTERS)}"


def _unprepared(connection: Connection, ablation_id: str) -> str | None:
    """Return why the code or data of the first block could not be prepared, if every block would fail by it."""
    failed = select(blocks.c.id).where(blocks.c.ablation_id == ablation_id, blocks.c.state == BlockState.FAILED)
    ours = attempts.c.block_id == failed.scalar_subquery(), attempts.c.state == AttemptState.BROKEN
    columns = attempts.c.failure_class, attempts.c.arm, attempts.c.message
    last = connection.execute(select(*columns).where(*ours).order_by(attempts.c.number.desc()).limit(1)).first()
    if last is None or last.arm is not None or not FailureClass(last.failure_class).rule.is_result:
        return None
    return f"the first block failed: {wording.shorten(last.message, _REASON_CHARACTERS)}"


def lock_waiting(connection: Connection, ablation_id: str, *, wait: bool) -> list[Row[Any]]:
    """Lock the queued and held blocks, by id; unless `wait`, skip those that another transaction has locked."""
    waiting = blocks.c.state.in_([BlockState.QUEUED, BlockState.HELD])
    query = select(blocks.c.id, blocks.c.state).where(blocks.c.ablation_id == ablation_id, waiting)
    return list(connection.execute(query.order_by(blocks.c.id).with_for_update(skip_locked=not wait, key_share=True)))


def cancel_blocks(
    connection: Connection, transitions: Transitions, ablation_id: str, waiting: Sequence[Row[Any]], *, reason: str
) -> None:
    """Cancel these queued and held blocks, which the caller has locked, and their trials."""
    if not waiting:
        return
    for state in (BlockState.QUEUED, BlockState.HELD):
        ids = [row.id for row in waiting if row.state == state]
        transitions.move(ids, state, BlockState.CANCELLED, reason=reason, finished_at=db_now(), message=reason)
    cancelled = select(blocks.c.id).where(blocks.c.ablation_id == ablation_id, blocks.c.state == BlockState.CANCELLED)
    unstarted = select(trials.c.id).where(trials.c.block_id.in_(cancelled), trials.c.state == TrialState.QUEUED)
    trial_ids = list(connection.execute(unstarted).scalars())
    transitions.move(trial_ids, TrialState.QUEUED, TrialState.CANCELLED, reason=reason)


def complete_cancelling(connection: Connection) -> int:
    """End the cancelled ablations whose last block has ended; return how many."""
    running = select(blocks.c.id).where(blocks.c.ablation_id == ablations.c.id, blocks.c.state == BlockState.RUNNING)
    stuck = select(ablations.c.id).where(ablations.c.state == AblationState.CANCELLING, ~running.exists())
    ids = list(connection.execute(stuck).scalars())
    for ablation_id in ids:
        complete_if_done(connection, ablation_id)
    return len(ids)


def _end(connection: Connection, row: Row[Any]) -> None:
    old = AblationState(row.state)
    if old == AblationState.CANCELLING and row.blocks_cancelled:
        new, reason, next_kind = AblationState.CANCELLED, "no block is running any more", OutboxKind.REPORT
    elif row.blocks_done:
        new, reason, next_kind = AblationState.COMPLETED, _completed_reason(connection, row), OutboxKind.JUDGE
    else:
        new, reason, next_kind = AblationState.FAILED, failed_reason(connection, row.id), OutboxKind.JUDGE
    transitions = Transitions(connection, row.id, actor="service", locked=old)
    transitions.move([row.id], old, new, reason=reason, finished_at=db_now(), **NOT_SHOWN)
    transitions.flush()
    rank = outbox.Rank.LATER if new == AblationState.CANCELLED else outbox.Rank.FIRST
    outbox.add(connection, next_kind, row.id, rank=rank)


def failed_reason(connection: Connection, ablation_id: str) -> str:
    """Return for example "no block counted, 6 failed; the first: ..." with the message of the first failed block.

    Blocks that did not run follow, with the reason.
    """
    ended = blocks.c.state.in_([BlockState.FAILED, BlockState.CANCELLED])
    query = select(blocks.c.state, blocks.c.message).where(blocks.c.ablation_id == ablation_id, ended)
    rows = connection.execute(query.order_by(blocks.c["index"])).all()
    failed = [row.message for row in rows if row.state == BlockState.FAILED]
    not_run = [row.message for row in rows if row.state == BlockState.CANCELLED]
    first = f"; the first: {wording.shorten(failed[0], _REASON_CHARACTERS)}" if failed and failed[0] else ""
    rest = f"; {len(not_run):,} not run: {not_run[0]}" if not_run else ""
    return f"no block counted, {len(failed):,} failed{first}{rest}"


def _completed_reason(connection: Connection, row: Row[Any]) -> str:
    """Return for example "6 blocks done, 0 failed", and why some trials have no measurements.

    A block counts as done regardless of its trials' outcomes. Reads every trial, once in the life of an ablation.
    """
    arm = (trials.c.role, trials.c.arm, trials.c.outcome)
    unmeasured = select(*arm, func.count().label("trials")).where(*_unmeasured(row.id)).group_by(*arm)
    arms = sorted(connection.execute(unmeasured), key=lambda one: (one.role != BASELINE, one.arm, one.outcome))
    counts = [f"{wording.counted(row.blocks_done, 'block')} done", f"{row.blocks_failed:,} failed"]
    if row.blocks_cancelled:
        counts.append(f"{row.blocks_cancelled:,} not run")
    if not arms:
        return ", ".join(counts)
    comparable = _comparable_blocks(connection, row.id)
    if comparable != row.blocks_done:
        counts.insert(1, f"{f'{comparable:,}' if comparable else 'none'} of them comparable")
    named = [f"{one.arm} {one.outcome} in {one.trials:,}" for one in arms[:_NAMED_ARMS]]
    more = [f"{len(arms) - _NAMED_ARMS} more"] if len(arms) > _NAMED_ARMS else []
    return f"{', '.join(counts)}: {wording.listed([*named, *more])}{_first_message(connection, row.id)}"


def _unmeasured(ablation_id: str) -> tuple[Any, ...]:
    return trials.c.ablation_id == ablation_id, trials.c.outcome != Outcome.MEASURED


def _comparable_blocks(connection: Connection, ablation_id: str) -> int:
    """Return in how many blocks both the baseline and a variant have measurements."""
    other = trials.alias("other")
    beside = (other.c.block_id == trials.c.block_id, other.c.role == BASELINE, other.c.outcome == Outcome.MEASURED)
    own = (trials.c.ablation_id == ablation_id, trials.c.role == VARIANT, trials.c.outcome == Outcome.MEASURED)
    query = select(func.count(trials.c.block_index.distinct())).where(*own, select(other.c.id).where(*beside).exists())
    return int(connection.execute(query).scalar_one())


def _first_message(connection: Connection, ablation_id: str) -> str:
    """Say why the first trial without a measurement has none."""
    first = select(receipts.c.payload).join(trials, trials.c.id == receipts.c.trial_id).where(*_unmeasured(ablation_id))
    first = first.order_by(trials.c.block_index, trials.c.position).limit(1)
    message = json.loads(connection.execute(first).scalar_one())["message"]
    return f"; the first: {wording.shorten(message, _REASON_CHARACTERS)}" if message else ""
