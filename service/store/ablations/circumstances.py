"""Inputs of a verdict beside plan, spec and receipts: broken attempts, earlier ablations, signers, cancelled blocks."""

import json
from typing import Any

from sqlalchemy import Connection, Row, Select, and_, or_, select

from experiments.design.plan import question_digest
from experiments.outcomes import AblationState, BlockState
from experiments.records.circumstances import Circumstances, EarlierAblation, Family
from service.lifecycle import OVER
from service.store.access import keys
from service.store.blocks.attempts import broken_attempts
from service.store.tables import ablations, blocks, questions, rfc3339

_SHOWN = (ablations.c.id, ablations.c.name, ablations.c.state, ablations.c.created_at, ablations.c.verdict)


def family_of(connection: Connection, ablation_id: str) -> Family:
    """Return the earlier ablations that asked a question of this one, oldest first.

    Leaves out ablations that ended before any block was claimed, because nobody saw a result of theirs.
    """
    own = connection.execute(select(questions.c.digest, questions.c.arm).where(questions.c.ablation_id == ablation_id))
    arms: dict[str, list[str]] = {}
    for digest, arm in own:
        arms.setdefault(digest, []).append(arm)
    rows: dict[str, Row[Any]] = {}
    shared: dict[str, list[str]] = {}
    for row in connection.execute(_earlier(ablation_id, list(arms))):
        rows[row.id] = row
        shared.setdefault(row.id, []).extend(arms[row.digest])
    return Family(
        question_digest=question_digest(arms),
        earlier=tuple(_public(row, shared[ablation]) for ablation, row in rows.items()),
    )


def _earlier(ablation_id: str, digests: list[str]) -> Select[Any]:
    mine = select(ablations.c.created_at).where(ablations.c.id == ablation_id).scalar_subquery()
    before = or_(ablations.c.created_at < mine, and_(ablations.c.created_at == mine, ablations.c.id < ablation_id))
    ran = or_(ablations.c.started_at.is_not(None), ablations.c.state.not_in(OVER))
    query: Select[Any] = select(*_SHOWN, questions.c.digest).join(questions, questions.c.ablation_id == ablations.c.id)
    return query.where(questions.c.digest.in_(digests), before, ran).order_by(ablations.c.created_at, ablations.c.id)


def _public(row: Row[Any], shared: list[str]) -> EarlierAblation:
    verdict = {"variants": []} if row.verdict is None else json.loads(row.verdict)
    return EarlierAblation(
        ablation=row.id,
        name=row.name,
        state=AblationState(row.state),
        created_at=rfc3339(row.created_at),
        asked=tuple(sorted(set(shared))),
        words={variant["arm"]: variant["verdict"] for variant in verdict["variants"]},
    )


def circumstances_of(connection: Connection, ablation_id: str) -> Circumstances:
    """Return the inputs of a verdict that are neither in the spec nor in the receipts."""
    unsigned = connection.scalar(select(ablations.c.unsigned).where(ablations.c.id == ablation_id))
    return Circumstances(
        attempts=broken_attempts(connection, ablation_id),
        family=family_of(connection, ablation_id),
        signers=keys.signers(connection, ablation_id),
        unsigned=() if unsigned is None else tuple(json.loads(unsigned)),
        not_run=_not_run(connection, ablation_id),
    )


def _not_run(connection: Connection, ablation_id: str) -> str | None:
    """Return why blocks were cancelled; None if none was."""
    cancelled = select(blocks.c.message).where(
        blocks.c.ablation_id == ablation_id, blocks.c.state == BlockState.CANCELLED
    )
    return connection.scalar(cancelled.order_by(blocks.c["index"]).limit(1))
