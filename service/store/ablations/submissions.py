"""Submission, the first step in the life of a block: all rows of an ablation and the answer to its Idempotency-Key.

One transaction stores them. The first blocks are queued, those beyond the first look held; `blocks/turns.py` goes on.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, delete, insert, select
from sqlalchemy.exc import IntegrityError

from ablate.experiments.design.kinds.command import sent_code
from ablate.experiments.design.plan import Plan, draw_seeds
from ablate.experiments.design.plan import questions as question_digests
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.outcomes import AblationState, BlockState, TrialState
from ablate.experiments.records.calibration import Sizing
from ablate.experiments.records.identity import BlockIds, new_block_ids
from ablate.experiments.system.logs import current_request_id
from ablate.service.errors import IdempotencyMismatch, ServiceError
from ablate.service.lifecycle import EventKind, OutboxKind
from ablate.service.store import outbox
from ablate.service.store.blocks.transitions import Transitions
from ablate.service.store.blocks.turns import reached
from ablate.service.store.files import code_archives
from ablate.service.store.nodes.calibrations import read_sizing
from ablate.service.store.nodes.placement import Needs
from ablate.service.store.tables import ablations, blocks, db_now, idempotency, labels, questions, trials


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
    """The token that submitted it; None for the service itself and for an import."""
    code_user: str | None = None
    """The token whose archives it may use; None for all, as the service and operators may."""


@dataclass(frozen=True, kw_only=True)
class IdempotencyKey:
    """An Idempotency-Key: the token that sent it, the key, and the digest of the body."""

    token_id: str
    key: str
    body_digest: str


@dataclass(frozen=True, kw_only=True)
class StoredAnswer:
    """The answer to a submission, word for word."""

    ablation_id: str
    text: str


class KeyUsed(ServiceError):
    """This Idempotency-Key was answered before."""


def find_answer(connection: Connection, key: IdempotencyKey) -> StoredAnswer | None:
    """Return the stored answer to this key, or None. Raises IdempotencyMismatch for another body."""
    own = (idempotency.c.token_id == key.token_id, idempotency.c.key == key.key)
    row = connection.execute(select(idempotency).where(*own)).first()
    if row is None:
        return None
    if row.body_digest != key.body_digest:
        raise IdempotencyMismatch
    return StoredAnswer(ablation_id=row.ablation_id, text=row.answer)


def store_submission(
    connection: Connection, submission: Submission, key: IdempotencyKey, answer: StoredAnswer
) -> Sizing | None:
    """Insert the idempotency row, then the ablation with its rows, first event, wake-up and announcement.

    Draws the seeds of its blocks unless the spec lists them. Only the claim of a block shows its seed.

    Returns the effect that its plan can detect at the noise that the service measured; None if it measured none.
    Raises KeyUsed if the key was answered before, and SpecError if code is missing, which end the transaction.
    """
    answered = {**vars(key), **{"ablation_id": answer.ablation_id, "answer": answer.text, "created_at": db_now()}}
    try:
        connection.execute(insert(idempotency).values(answered))
    except IntegrityError as error:
        raise KeyUsed from error
    submission = replace(submission, plan=draw_seeds(submission.plan))
    ablation_id, plan = submission.ablation_id, submission.plan
    first_look = submission.spec.design.blocks.schedule[0]
    insert_rows(connection, submission, new_block_ids(plan), first_look=first_look)
    transitions = Transitions(connection, ablation_id, actor=submission.submitted_by)
    transitions.add_event(EventKind.ABLATION_STATE, ablation_id, reason="submitted", new=AblationState.QUEUED)
    transitions.flush()
    code_archives.use_archives(connection, ablation_id, sent_code(submission.spec), user=submission.code_user)
    outbox.add(connection, OutboxKind.WAKE, plan.node_class)
    outbox.add(connection, OutboxKind.ANNOUNCE, ablation_id)
    return read_sizing(connection, submission.spec, plan)


def insert_rows(
    connection: Connection,
    submission: Submission,
    ids: Sequence[BlockIds],
    *,
    bundles: str | None = None,
    first_look: int | None = None,
) -> None:
    """Insert an ablation with its labels, questions, blocks and trials; `ids` of every block in the plan's order.

    Blocks from the index `first_look` on are held, all others queued. `bundles` are the digests of an import, as JSON.
    """
    held_from = len(ids) if first_look is None else first_look
    own = submission.ablation_id
    connection.execute(insert(ablations).values(**_ablation_row(submission, held_from), bundles=bundles))
    connection.execute(insert(blocks), _block_rows(submission, ids, held_from=held_from))
    connection.execute(insert(trials), _trial_rows(submission, ids))
    digests = question_digests(submission.spec, submission.plan)
    question_rows = [{"ablation_id": own, "arm": arm, "digest": digest} for arm, digest in digests.items()]
    label_rows = [
        {"ablation_id": own, "key": key, "value": str(value)} for key, value in submission.spec.labels.items()
    ]
    for table, rows in ((questions, question_rows), (labels, label_rows)):
        if rows:
            connection.execute(insert(table), rows)


def _ablation_row(submission: Submission, held_from: int) -> dict[str, Any]:
    spec, plan = submission.spec, submission.plan
    return {
        "id": submission.ablation_id,
        "name": spec.ablation,
        "question": spec.question,
        "state": AblationState.QUEUED,
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
        "priority": spec.limits.priority,
        "turn": reached(plan.node_class, spec.limits.priority),
        "created_at": db_now(),
        "blocks_planned": len(plan.blocks),
        "blocks_held": len(plan.blocks) - held_from,
        "blocks_queued": held_from,
        "trials_planned": len(plan.blocks) * len(plan.arms),
    }


def _block_rows(submission: Submission, ids: Sequence[BlockIds], *, held_from: int) -> list[dict[str, Any]]:
    plan = submission.plan
    needs = Needs.of_plan(plan)
    return [
        {
            "id": own.block_id,
            "ablation_id": submission.ablation_id,
            "index": block.index,
            "seed": block.seed,
            "order": json.dumps(block.order),
            "node_class": plan.node_class,
            "lanes": needs.lanes,
            "back_ends": needs.back_ends,
            "num_devices": needs.devices,
            "num_nodes": needs.nodes,
            "state": BlockState.HELD if block.index >= held_from else BlockState.QUEUED,
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
            "state": TrialState.QUEUED,
        }
        for own, block in zip(ids, submission.plan.blocks, strict=True)
        for position, (trial_id, arm) in enumerate(zip(own.trial_ids, block.order, strict=True))
    ]


def forget_idempotency(connection: Connection, *, age_s: float) -> int:
    """Delete answers to Idempotency-Keys older than `age_s`; return how many."""
    return connection.execute(delete(idempotency).where(idempotency.c.created_at < db_now() - age_s)).rowcount
