"""Rows to wire types: how ablations, blocks, trials and nodes look from outside."""

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row

from experiments.analysis.sizing import Sizing
from experiments.design.plan import Plan
from experiments.outcomes import AblationState
from experiments.records.messages import NodeRegistration
from service.schemas.ablations import (
    AblationPublic,
    BlockCounts,
    BlockPublic,
    Links,
    Progress,
    TrialCounts,
    TrialPublic,
)
from service.schemas.events import Event
from service.schemas.nodes import KeyPublic, NodePublic
from service.schemas.submissions import AblationAccepted, NodeClassAnswer, PlanPublic
from service.schemas.tokens import SecretPublic, TokenPublic
from service.settings import ServiceSettings
from service.store.ablations import blocks_ahead
from service.store.columns import rfc3339
from service.store.nodes import count_live


def links_of(ablation_id: str) -> Links:
    """Return where to go from an ablation."""
    own = f"/v1/ablations/{ablation_id}"
    return Links(
        self=own, events=f"{own}/events", verdict=f"{own}/verdict", report=f"{own}/report", cancel=f"{own}:cancel"
    )


def plan_public(
    plan: Plan, *, expected_device_minutes: float | None, node_classes: list[NodeClassAnswer], sizing: Sizing | None
) -> PlanPublic:
    """Build the wire type."""
    arms = [arm.model_dump(exclude={"config"}) for arm in plan.arms]
    answers = {"expected_device_minutes": expected_device_minutes, "node_classes": node_classes, "sizing": sizing}
    return PlanPublic.model_validate(
        {**_plan_fields(plan), "arms": arms, "blocks": [block.model_dump() for block in plan.blocks], **answers}
    )


def accepted_public(ablation_id: str, plan: Plan) -> AblationAccepted:
    """Build the answer to a submission."""
    fields = _plan_fields(plan)
    summary = {**fields, "arms": [arm.name for arm in plan.arms], "blocks": len(plan.blocks)}
    own = {"id": ablation_id, "name": plan.ablation, "state": AblationState.QUEUED, "links": links_of(ablation_id)}
    return AblationAccepted.model_validate({**fields, **own, "plan": summary})


def _plan_fields(plan: Plan) -> dict[str, Any]:
    return {**plan.model_dump(exclude={"arms", "blocks"}), "trials": len(plan.blocks) * len(plan.arms)}


def silent_limit_s(settings: ServiceSettings) -> float:
    """Return the silence after which a node no longer counts as live."""
    return max(settings.lease_s, 3 * settings.claim_poll_s)


def _fields(row: Row[Any], **changes: Any) -> dict[str, Any]:
    """Return a row by its columns' names, which are the wire types' fields, with moments as RFC 3339 UTC."""
    values = dict(row._mapping)
    moments = {name: rfc3339(at) for name, at in values.items() if name.endswith("_at") and at is not None}
    return {**values, **moments, **changes}


def ablation_public(
    row: Row[Any], labels: Mapping[str, str], *, waiting_for: str | None, mlflow: str
) -> AblationPublic:
    """Build the wire type; `mlflow` is MLflow's base URL."""
    values = _fields(
        row,
        blocks=BlockCounts(planned=row.blocks_planned, done=row.blocks_done, failed=row.blocks_failed),
        trials=TrialCounts(planned=row.trials_planned, done=row.trials_done),
        waiting_for=waiting_for,
        labels=labels,
        mlflow_url=_mlflow_url(row, mlflow),
        bundles=json.loads(row.bundles or "[]"),
        links=links_of(row.id),
    )
    return AblationPublic.model_validate(values)


def _mlflow_url(row: Row[Any], base: str) -> str | None:
    if row.mlflow_run_id is None:
        return None
    return f"{base.rstrip('/')}/#/experiments/{row.mlflow_experiment_id}/runs/{row.mlflow_run_id}"


def waiting_reasons(connection: Connection, rows: list[Row[Any]], settings: ServiceSettings) -> dict[str, str]:
    """Return, for every queued ablation among `rows`, what it waits for."""
    queued = [row for row in rows if row.state == AblationState.QUEUED]
    live = count_live(connection, silent_s=silent_limit_s(settings)) if queued else {}
    return {row.id: _waiting_reason(connection, row, live.get(row.node_class, 0)) for row in queued}


def _waiting_reason(connection: Connection, row: Row[Any], live: int) -> str:
    if not live:
        return f"a live node of class '{row.node_class}'; none was heard lately"
    ahead = blocks_ahead(connection, row)
    return f"a free node of class '{row.node_class}' ({live} live, {ahead} blocks ahead in the queue)"


def block_public(row: Row[Any]) -> BlockPublic:
    """Build the wire type."""
    return BlockPublic.model_validate(_fields(row, order=json.loads(row._mapping["order"])))


def trial_public(row: Row[Any]) -> TrialPublic:
    """Build the wire type."""
    values = _fields(row)
    progress = None if row.steps_done is None else Progress.model_validate(values)
    return TrialPublic.model_validate({**values, "progress": progress})


def event_public(row: Row[Any]) -> Event:
    """Build the wire type."""
    values = _fields(row, at=rfc3339(row.at), came_from=row.old, went_to=row.new, data=json.loads(row.data))
    return Event.model_validate(values)


def key_public(row: Row[Any]) -> KeyPublic:
    """Build the wire type."""
    return KeyPublic.model_validate(_fields(row))


def node_public(row: Row[Any], settings: ServiceSettings) -> NodePublic:
    """Build the wire type."""
    found = NodeRegistration.model_validate_json(row.registration)
    health = "live" if row.silent_s <= silent_limit_s(settings) else "silent"
    return NodePublic.model_validate({**found.model_dump(), **_fields(row, health=health)})


def token_public(row: Row[Any], *, secrets: list[SecretPublic], used: float) -> TokenPublic:
    """Build the wire type; `secrets` are those that count, `used` the device minutes of its ablations."""
    return TokenPublic.model_validate(_fields(row, secrets=secrets, device_minutes_used=used))


def secret_public(row: Row[Any]) -> SecretPublic:
    """Build the wire type."""
    return SecretPublic.model_validate(_fields(row))
