"""Rows to wire types: how ablations, blocks, trials and nodes look from outside."""

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row

from experiments.records.messages import NodeRegistration
from service.lifecycle import AblationState
from service.schemas import (
    AblationPublic,
    BlockCounts,
    BlockPublic,
    Event,
    Links,
    NodePublic,
    Progress,
    TrialCounts,
    TrialPublic,
)
from service.settings import ServiceSettings
from service.store.ablations import blocks_ahead
from service.store.columns import rfc3339, rfc3339_or_none
from service.store.nodes import count_live


def links_of(ablation_id: str) -> Links:
    """Return where to go from an ablation."""
    own = f"/v1/ablations/{ablation_id}"
    return Links(
        self=own, events=f"{own}/events", verdict=f"{own}/verdict", report=f"{own}/report", cancel=f"{own}:cancel"
    )


def silent_limit_s(settings: ServiceSettings) -> float:
    """Return the silence after which a node no longer counts as live."""
    return max(settings.lease_s, 3 * settings.claim_poll_s)


def ablation_public(
    row: Row[Any], labels: Mapping[str, str], *, waiting_for: str | None, mlflow: str
) -> AblationPublic:
    """Build the wire type; `mlflow` is MLflow's base URL."""
    return AblationPublic(
        id=row.id,
        name=row.name,
        question=row.question,
        state=AblationState(row.state),
        spec_digest=row.spec_digest,
        rule_digest=row.rule_digest,
        node_class=row.node_class,
        created_at=rfc3339(row.created_at),
        started_at=rfc3339_or_none(row.started_at),
        finished_at=rfc3339_or_none(row.finished_at),
        blocks=BlockCounts(planned=row.blocks_planned, done=row.blocks_done, failed=row.blocks_failed),
        trials=TrialCounts(planned=row.trials_planned, done=row.trials_done),
        waiting_for=waiting_for,
        labels=dict(labels),
        mlflow_url=_mlflow_url(row, mlflow),
        bundles=json.loads(row.bundles) if row.bundles else [],
        links=links_of(row.id),
    )


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
    fields = row._mapping
    return BlockPublic(
        id=row.id,
        index=fields["index"],
        seed=row.seed,
        order=json.loads(fields["order"]),
        state=row.state,
        attempt_no=row.attempt_no,
        node_id=row.node_id,
        started_at=rfc3339_or_none(row.started_at),
        finished_at=rfc3339_or_none(row.finished_at),
        message=row.message,
    )


def trial_public(row: Row[Any]) -> TrialPublic:
    """Build the wire type."""
    progress = None
    if row.steps_done is not None:
        progress = Progress(
            steps_done=row.steps_done, steps_total=row.steps_total, tokens_per_s=row.tokens_per_s, loss=row.loss
        )
    return TrialPublic(
        id=row.id,
        block_id=row.block_id,
        block_index=row.block_index,
        arm=row.arm,
        role=row.role,
        position=row.position,
        state=row.state,
        outcome=row.outcome,
        progress=progress,
        receipt_digest=row.receipt_digest,
    )


def event_public(row: Row[Any]) -> Event:
    """Build the wire type."""
    return Event(
        seq=row.seq,
        at=rfc3339(row.at),
        kind=row.kind,
        subject=row.subject,
        came_from=row.old,
        went_to=row.new,
        actor=row.actor,
        reason=row.reason,
        data=json.loads(row.data),
    )


def node_public(row: Row[Any], settings: ServiceSettings) -> NodePublic:
    """Build the wire type."""
    found = NodeRegistration.model_validate_json(row.registration)
    return NodePublic(
        id=row.id,
        name=row.name,
        node_class=row.node_class,
        health="live" if row.silent_s <= silent_limit_s(settings) else "silent",
        devices=list(found.devices),
        versions=dict(found.versions),
        code_digest=found.code_digest,
        lacks=list(found.lacks),
        registered_at=rfc3339(row.registered_at),
        seen_at=rfc3339(row.seen_at),
        running_block=row.running_block,
    )
