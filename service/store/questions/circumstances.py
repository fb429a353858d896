"""Inputs of a verdict beside plan, spec and receipts: broken attempts, earlier ablations, signers, cancelled blocks."""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from sqlalchemy import Connection, Row, Select, exists, func, literal, null, or_, select

from ablate.experiments.analysis.verdicts import Cause, Verdict
from ablate.experiments.design.plan import question_digest
from ablate.experiments.design.spec import MIN_BLOCKS
from ablate.experiments.outcomes import AblationState, BlockState, FailureClass
from ablate.experiments.records.circumstances import (
    REGISTERED,
    CarriedPlan,
    Circumstances,
    EarlierAblation,
    Family,
)
from ablate.service.lifecycle import OVER
from ablate.service.store.access import keys
from ablate.service.store.blocks.attempts import broken_attempts
from ablate.service.store.tables import ablations, blocks, questions, registered_plans, registered_questions, rfc3339

_MOMENT = func.coalesce(registered_plans.c.registered_at, ablations.c.created_at).label("moment")
"""When a question was asked: a plan that ran elsewhere counts since its registration."""
_RAN = or_(ablations.c.started_at.is_not(None), ablations.c.state.not_in(OVER))
"""Whether somebody could see a result."""


def family_of(connection: Connection, ablation_id: str) -> Family:
    """Return the earlier ablations and registered plans that asked a question of this one, oldest first.

    Leaves out ablations that ended before any block was claimed, because nobody saw a result of theirs, and those
    that others' load spoiled.
    """
    arms = _by_digest(_asked_by(connection, ablation_id))
    return _family(connection, arms, before=(_asked_at(connection, ablation_id), ablation_id))


def family_if_asked_now(connection: Connection, own_questions: Mapping[str, str]) -> Family:
    """Return the earlier askings for an ablation with these questions, by arm, that is not stored yet."""
    arms = _by_digest((digest, arm) for arm, digest in own_questions.items())
    return _family(connection, arms, before=(math.inf, ""))


def other_askings(connection: Connection, ablation_id: str) -> list[Row[Any]]:
    """Return the other ablations that ran and share a question with this one, later ones included, oldest first."""
    own = select(questions.c.digest).where(questions.c.ablation_id == ablation_id)
    alike = select(questions.c.ablation_id).where(questions.c.digest.in_(own))
    is_later = (_asked_at(connection, ablation_id) < _MOMENT).label("is_later")
    columns = (ablations.c.id, ablations.c.name, ablations.c.state, ablations.c.answer, _MOMENT, is_later)
    query: Select[Any] = select(*columns).outerjoin(registered_plans, registered_plans.c.ablation_id == ablations.c.id)
    query = query.where(ablations.c.id.in_(alike), ablations.c.id != ablation_id, _RAN)
    return list(connection.execute(query.order_by(_MOMENT, ablations.c.id)))


def _by_digest(asked: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    arms: dict[str, list[str]] = {}
    for digest, arm in asked:
        arms.setdefault(digest, []).append(arm)
    return arms


def _family(connection: Connection, arms: Mapping[str, list[str]], *, before: tuple[float, str]) -> Family:
    rows: dict[str, Row[Any]] = {}
    shared: dict[str, list[str]] = {}
    asked = [row for query in (_ablations(arms), _only_registered(arms)) for row in connection.execute(query)]
    for row in sorted(asked, key=lambda row: (row.moment, row.id)):
        if (row.moment, row.id) < before and not _is_spoiled(row):
            rows[row.id] = row
            shared.setdefault(row.id, []).extend(arms[row.digest])
    return Family(
        question_digest=question_digest(arms),
        earlier=tuple(_public(row, shared[ablation]) for ablation, row in rows.items()),
    )


def _asked_by(connection: Connection, ablation_id: str) -> Iterator[tuple[str, str]]:
    """Yield digest and arm of each question of an ablation, or of a registered plan."""
    for table in (questions, registered_questions):
        rows = connection.execute(select(table.c.digest, table.c.arm).where(table.c.ablation_id == ablation_id)).all()
        if rows:
            yield from ((row.digest, row.arm) for row in rows)
            return


def _asked_at(connection: Connection, ablation_id: str) -> float:
    plan = select(registered_plans.c.registered_at).where(registered_plans.c.ablation_id == ablation_id)
    submitted = select(ablations.c.created_at).where(ablations.c.id == ablation_id)
    return float(connection.scalar(plan) or connection.execute(submitted).scalar_one())


def _ablations(digests: Collection[str]) -> Select[Any]:
    columns = (ablations.c.id, ablations.c.name, ablations.c.state, ablations.c.verdict, _MOMENT, questions.c.digest)
    query: Select[Any] = select(*columns).join(questions, questions.c.ablation_id == ablations.c.id)
    query = query.outerjoin(registered_plans, registered_plans.c.ablation_id == ablations.c.id)
    return query.where(questions.c.digest.in_(digests), _RAN)


def _only_registered(digests: Collection[str]) -> Select[Any]:
    """Select the registered plans of which nothing was imported."""
    plan, asked = registered_plans.c, registered_questions.c
    query: Select[Any] = select(
        plan.ablation_id.label("id"),
        plan.name,
        literal(REGISTERED).label("state"),
        null().label("verdict"),
        plan.registered_at.label("moment"),
        asked.digest,
    )
    query = query.join(registered_questions, asked.ablation_id == plan.ablation_id)
    imported = exists().where(ablations.c.id == plan.ablation_id)
    return query.where(asked.digest.in_(digests), ~imported)


def _is_spoiled(row: Row[Any]) -> bool:
    """Return whether others' load spoiled an earlier ablation; the text is searched first, because parsing is slow."""
    return FailureClass.DISTURBED in (row.verdict or "") and was_spoiled(Verdict.model_validate_json(row.verdict))


_FROM_OUTSIDE = {
    FailureClass.DISTURBED,
    FailureClass.PREEMPTED,
    FailureClass.INFRA_CONTROL,
    FailureClass.INFRA_NODE,
}
"""Ends of attempts that say nothing about an arm."""


def was_spoiled(verdict: Verdict) -> bool:
    """Return whether others' load left too few blocks for any verdict, so that its questions were not asked.

    The load may have used up the device minutes too. Whether such an ablation has a verdict does not depend on its
    measurements, so the next one keeps the level. A look that might have given a verdict has spent its share.
    """
    ended_by = {one.failure_class for one in verdict.circumstances.attempts}
    from_outside = FailureClass.DISTURBED in ended_by and ended_by <= _FROM_OUTSIDE
    looked = len(verdict.rule["looks"]) > 1 and verdict.blocks_counted >= MIN_BLOCKS
    return from_outside and not looked and all(one.cause is Cause.MISSING for one in verdict.variants)


def _public(row: Row[Any], shared: list[str]) -> EarlierAblation:
    verdict = {"variants": []} if row.verdict is None else json.loads(row.verdict)
    return EarlierAblation(
        ablation=row.id,
        name=row.name,
        state=REGISTERED if row.state == REGISTERED else AblationState(row.state),
        created_at=rfc3339(row.moment),
        asked=tuple(sorted(set(shared))),
        words={variant["arm"]: variant["verdict"] for variant in verdict["variants"]},
    )


def _carried(connection: Connection, ablation_id: str) -> CarriedPlan | None:
    """Return whether this service registered the plan of an import with a question; None for any other ablation."""
    imported = connection.scalar(select(ablations.c.bundles).where(ablations.c.id == ablation_id))
    if imported is None or not list(_asked_by(connection, ablation_id)):
        return None
    plan = select(registered_plans.c.registered_at).where(registered_plans.c.ablation_id == ablation_id)
    moment = connection.scalar(plan)
    return CarriedPlan(registered_at=None if moment is None else rfc3339(moment), compared=True)


def circumstances_of(connection: Connection, ablation_id: str) -> Circumstances:
    """Return the inputs of a verdict that are neither in the spec nor in the receipts."""
    return Circumstances(
        attempts=broken_attempts(connection, ablation_id),
        family=family_of(connection, ablation_id),
        signers=keys.signers(connection, ablation_id),
        carried=_carried(connection, ablation_id),
        not_run=_not_run(connection, ablation_id),
    )


def _not_run(connection: Connection, ablation_id: str) -> str | None:
    """Return why blocks were cancelled; None if none was."""
    cancelled = select(blocks.c.message).where(
        blocks.c.ablation_id == ablation_id, blocks.c.state == BlockState.CANCELLED
    )
    return connection.scalar(cancelled.order_by(blocks.c["index"]).limit(1))
