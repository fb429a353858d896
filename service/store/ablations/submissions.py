"""Storing a submitted ablation: all of its rows and the answer to its Idempotency-Key, in one transaction."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, delete, select
from sqlalchemy.exc import IntegrityError

from experiments.analysis.sizing import workload_of
from experiments.design.plan import Plan
from experiments.design.questions import questions as question_digests
from experiments.design.spec import AblationSpec
from experiments.outcomes import AblationState, BlockState, TrialState
from experiments.records.identity import BlockIds, new_block_ids
from experiments.records.sizing import Sizing
from experiments.runtime.logs import current_request_id
from service.errors import IdempotencyMismatch, ServiceError
from service.lifecycle import EventKind, OutboxKind
from service.store import outbox
from service.store.blocks.transitions import Transitions
from service.store.blocks.turns import reached
from service.store.columns import db_now
from service.store.inserts import Part, Target, insert_all
from service.store.nodes.calibrations import OF_WORKLOAD, sizing_of
from service.store.nodes.placement import lanes_of
from service.store.tables import ablations, blocks, idempotency, labels, questions, trials

_ANSWER = Target(table=idempotency, made={"created_at": db_now()})
_TURN = reached(bindparam("queue_class"), bindparam("queue_priority"))
_ABLATION = Target(table=ablations, made={"created_at": db_now()}, added={"turn": _TURN})
_BLOCKS, _TRIALS, _QUESTIONS, _LABELS = (Target(table=one) for one in (blocks, trials, questions, labels))
_KNOWN = select(idempotency.c.body_digest, idempotency.c.ablation_id, idempotency.c.answer)


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A validated spec on its way into the store."""

    ablation_id: str
    spec: AblationSpec
    plan: Plan
    spec_text: str
    content_type: str
    submitted_by: str
    token_id: str | None = None
    """Whose it is; None for the service itself and for what was imported."""


@dataclass(frozen=True, kw_only=True)
class IdempotencyKey:
    """An Idempotency-Key: whose, which, and for which body."""

    token_id: str
    key: str
    body_digest: str


@dataclass(frozen=True, kw_only=True)
class GivenAnswer:
    """What a submission was answered, word for word."""

    ablation_id: str
    text: str


class KeyKnown(ServiceError):
    """This Idempotency-Key was answered before."""


def find_answer(connection: Connection, key: IdempotencyKey) -> GivenAnswer | None:
    """Return the answer given before to this key, or None. Raises IdempotencyMismatch for another body."""
    query = _KNOWN.where(idempotency.c.token_id == key.token_id, idempotency.c.key == key.key)
    row = connection.execute(query).first()
    if row is None:
        return None
    if row.body_digest != key.body_digest:
        raise IdempotencyMismatch
    return GivenAnswer(ablation_id=row.ablation_id, text=row.answer)


def store_submission(
    connection: Connection, submission: Submission, key: IdempotencyKey, answer: GivenAnswer
) -> Sizing | None:
    """Insert the idempotency row, then the ablation with its blocks, trials, first event, wake-up and announcement.

    Return what its plan can see at the noise that the service measured; None where it knows none. Raises KeyKnown when
    the key was answered before; the transaction is over then.
    """
    answered = {"token_id": key.token_id, "key": key.key, "body_digest": key.body_digest}
    transitions = Transitions(connection, submission.ablation_id, actor=submission.submitted_by)
    transitions.add_event(
        EventKind.ABLATION_STATE, submission.ablation_id, reason="submitted", new=AblationState.QUEUED
    )
    first_look = submission.spec.design.blocks.schedule[0]
    after = [(OutboxKind.WAKE, submission.plan.node_class), (OutboxKind.ANNOUNCE, submission.ablation_id)]
    parts = [
        (_ANSWER, [{**answered, "ablation_id": answer.ablation_id, "answer": answer.text}]),
        *_parts(submission, new_block_ids(submission.plan), first_look=first_look),
        transitions.new_events(),
        (outbox.NEW, [outbox.row(kind, key) for kind, key in after]),
    ]
    spec, plan = submission.spec, submission.plan
    given = {**_queue(submission), "workload": workload_of(plan, spec)}
    try:
        noise = insert_all(connection, parts, given, then=OF_WORKLOAD)
    except IntegrityError as error:
        raise KeyKnown from error
    return sizing_of(noise, spec, plan)


def insert_rows(connection: Connection, submission: Submission, ids: Sequence[BlockIds], *, bundles: str) -> None:
    """Insert an imported ablation with its labels, blocks and trials; `ids` of every block in the plan's order."""
    insert_all(connection, _parts(submission, ids, bundles=bundles), _queue(submission))


def _queue(submission: Submission) -> dict[str, Any]:
    """Return the queue whose turn the ablation starts at."""
    return {"queue_class": submission.plan.node_class, "queue_priority": submission.spec.limits.priority}


def _parts(
    submission: Submission, ids: Sequence[BlockIds], *, bundles: str | None = None, first_look: int | None = None
) -> list[Part]:
    """Return the rows of an ablation. Blocks from the index `first_look` on are held, all others queued."""
    held_from = len(ids) if first_look is None else first_look
    own = submission.ablation_id
    asked = question_digests(submission.spec, submission.plan).items()
    return [
        (_ABLATION, [{**_ablation_row(submission, held_from), "bundles": bundles}]),
        (_BLOCKS, _block_rows(submission, ids, held_from=held_from)),
        (_TRIALS, _trial_rows(submission, ids)),
        (_QUESTIONS, [{"ablation_id": own, "arm": arm, "digest": digest} for arm, digest in asked]),
        (_LABELS, [{"ablation_id": own, "key": k, "value": str(v)} for k, v in submission.spec.labels.items()]),
    ]


def _ablation_row(submission: Submission, held_from: int) -> dict[str, Any]:
    spec, plan = submission.spec, submission.plan
    return {
        "id": submission.ablation_id,
        "name": spec.ablation,
        "question": spec.question,
        "state": AblationState.QUEUED.value,
        "node_class": plan.node_class,
        "spec_text": submission.spec_text,
        "content_type": submission.content_type,
        "spec_digest": plan.spec_digest,
        "rule_digest": plan.rule_digest,
        "plan": plan.model_dump_json(),
        "trial_timeout_s": spec.limits.trial,
        "device_minutes": spec.limits.device_minutes,
        "submitted_by": submission.submitted_by,
        "request_id": current_request_id(),
        "token_id": submission.token_id,
        "blocks_planned": len(plan.blocks),
        "device_s": 0.0,
        "settled_s": 0.0,
        "priority": spec.limits.priority,
        "turn": 0,
        "blocks_held": len(plan.blocks) - held_from,
        "blocks_queued": held_from,
        "blocks_running": 0,
        "blocks_done": 0,
        "blocks_failed": 0,
        "blocks_cancelled": 0,
        "trials_planned": len(plan.blocks) * len(plan.arms),
        "trials_done": 0,
    }


def _block_rows(submission: Submission, ids: Sequence[BlockIds], *, held_from: int) -> list[dict[str, Any]]:
    plan = submission.plan
    lanes = lanes_of(plan)
    return [
        {
            "id": own.block_id,
            "ablation_id": submission.ablation_id,
            "index": block.index,
            "seed": block.seed,
            "order": json.dumps(block.order),
            "node_class": plan.node_class,
            "lanes": lanes,
            "num_devices": plan.devices,
            "state": BlockState.HELD if block.index >= held_from else BlockState.QUEUED,
            "attempt_no": 0,
            "not_before": 0.0,
            "avoid_until": 0.0,
        }
        for own, block in zip(ids, plan.blocks, strict=True)
    ]


def _trial_rows(submission: Submission, ids: Sequence[BlockIds]) -> list[dict[str, Any]]:
    roles = {arm.name: arm.role for arm in submission.plan.arms}
    return [
        {
            "id": trial_id,
            "ablation_id": submission.ablation_id,
            "block_id": own.block_id,
            "block_index": block.index,
            "position": position,
            "arm": arm,
            "role": roles[arm],
            "state": TrialState.QUEUED.value,
        }
        for own, block in zip(ids, submission.plan.blocks, strict=True)
        for position, (trial_id, arm) in enumerate(zip(own.trial_ids, block.order, strict=True))
    ]


def forget_idempotency(connection: Connection, *, age_s: float) -> int:
    """Delete answers to Idempotency-Keys older than `age_s`; return how many."""
    return connection.execute(delete(idempotency).where(idempotency.c.created_at < db_now() - age_s)).rowcount
