"""Conversion of rows to wire types: ablations, blocks, trials, nodes, keys and tokens."""

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Row

from ablate.experiments.analysis.noise.admission import mending_command
from ablate.experiments.design.plan import Plan
from ablate.experiments.design.power import FEWEST_BLOCKS, alpha_of, detectable_per_sd
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.outcomes import AblationState, SeedOrigin, TrialState
from ablate.experiments.records.calibration import Sizing
from ablate.experiments.records.circumstances import Family
from ablate.experiments.records.messages import NodeRegistration
from ablate.service.http import links
from ablate.service.http.links import below
from ablate.service.queue.waiting import Waiting
from ablate.service.schemas.ablations import (
    AblationPublic,
    BlockCounts,
    BlockPublic,
    Event,
    Links,
    Progress,
    TrialCounts,
    TrialPublic,
)
from ablate.service.schemas.nodes import KeyPublic, NodePublic
from ablate.service.schemas.submissions import AblationAccepted, AskingPublic, NodeClassAnswer, PlanPublic
from ablate.service.schemas.tokens import SecretPublic, TokenPublic
from ablate.service.settings import ServiceSettings
from ablate.service.store.ablations.device_minutes import Minutes, warnings_of
from ablate.service.store.tables import rfc3339


def links_of(ablation_id: str) -> Links:
    """Return the links of an ablation."""
    own = below(f"/v1/ablations/{ablation_id}")
    return Links(
        self=own, events=f"{own}/events", verdict=f"{own}/verdict", report=f"{own}/report", cancel=f"{own}:cancel"
    )


def plan_public(
    spec: AblationSpec,
    plan: Plan,
    *,
    expected_device_minutes: float | None,
    node_classes: list[NodeClassAnswer],
    sizing: Sizing | None,
    family: Family,
    repeats: bool,
) -> PlanPublic:
    """Build the wire type; `repeats` says whether A/A blocks showed that the metric repeats bit for bit."""
    arms = [arm.model_dump(exclude={"config"}) for arm in plan.arms]
    estimates = {
        "expected_device_minutes": expected_device_minutes,
        "node_classes": node_classes,
        "sizing": sizing,
        "mended_by": _mended_by(spec, sizing, repeats=repeats),
        "repeats": repeats,
        "control": None if plan.control is None else plan.control.name,
        "asking": _asking(spec, plan, family),
    }
    to_be_drawn = plan.seeds is SeedOrigin.TO_BE_DRAWN
    rule = {"over_seeds": spec.verdict.primary.over_seeds}
    limits = {"window_steps": spec.workload.steps.timed, "device_minutes_allowed": spec.limits.device_minutes}
    return PlanPublic.model_validate(
        {
            **_plan_fields(plan),
            "arms": arms,
            "blocks": [{**dict(block), "seed": None if to_be_drawn else block.seed} for block in plan.blocks],
            **estimates,
            **rule,
            **limits,
            "warnings": warnings_of(spec, expected_device_minutes),
        }
    )


def _asking(spec: AblationSpec, plan: Plan, family: Family) -> AskingPublic | None:
    """Return the number of this asking with its level and what the next one would cost."""
    if spec.purpose == "calibration" or spec.verdict.session is not None or spec.verdict.primary.exact:
        return None
    number = max(family.number_of(arm.name) for arm in plan.variants)
    blocks, look = spec.design.blocks.number, spec.design.blocks.last_look
    if spec.verdict.primary.over_seeds:
        blocks = spec.design.num_seeds
    now, later = (
        detectable_per_sd(max(blocks, FEWEST_BLOCKS), level=look.level(alpha_of(one) / len(plan.variants)))
        for one in (number, number + 1)
    )
    return AskingPublic(
        number=number,
        earlier=[one.name for one in family.earlier],
        level_pct=100 * alpha_of(number),
        next_level_pct=100 * alpha_of(number + 1),
        mde_pct_per_sd_pct=now,
        next_mde_factor=later / now,
    )


def _mended_by(spec: AblationSpec, sizing: Sizing | None, *, repeats: bool) -> str | None:
    needless = not spec.verdict.timed or spec.purpose == "calibration" or repeats
    calibrated = sizing is not None and sizing.calibration is not None
    return None if needless or calibrated else mending_command(spec.placement.node_class, "SPEC")


def accepted_public(
    ablation_id: str, plan: Plan, *, expected_device_minutes: float | None, warnings: list[str]
) -> AblationAccepted:
    """Build the answer to a submission."""
    fields = _plan_fields(plan) | {"expected_device_minutes": expected_device_minutes}
    control = None if plan.control is None else plan.control.name
    summary = {**fields, "arms": [arm.name for arm in plan.arms], "blocks": len(plan.blocks), "control": control}
    own = {"id": ablation_id, "name": plan.ablation, "state": AblationState.QUEUED, "links": links_of(ablation_id)}
    return AblationAccepted.model_validate({**fields, **own, "plan": summary, "warnings": warnings})


def _plan_fields(plan: Plan) -> dict[str, Any]:
    return {**plan.model_dump(exclude={"arms", "blocks"}), "trials": len(plan.blocks) * len(plan.arms)}


def silent_limit_s(settings: ServiceSettings) -> float:
    """Return the silence after which a node no longer counts as live."""
    return max(settings.lease_s, 3 * settings.claim_poll_s)


def _fields(row: Row[Any], **changes: Any) -> dict[str, Any]:
    """Return a row as a dict by column, which are the wire type's fields, with times in RFC 3339 UTC."""
    values = row._asdict()
    moments = {name: rfc3339(at) for name, at in values.items() if name.endswith("_at") and at is not None}
    return {**values, **moments, **changes}


def ablation_public(
    row: Row[Any], labels: Mapping[str, str], *, waiting: Waiting | None, mlflow: str
) -> AblationPublic:
    """Build the wire type; `mlflow` is MLflow's base URL."""
    values = _fields(
        row,
        blocks=BlockCounts(planned=row.blocks_planned, done=row.blocks_done, failed=row.blocks_failed),
        trials=TrialCounts(planned=row.trials_planned, done=row.trials_done),
        waiting_for=None if waiting is None else waiting.waiting_for,
        blocks_ahead=None if waiting is None else waiting.blocks_ahead,
        starts_in_s=None if waiting is None else waiting.starts_in_s,
        time_left_s=None if waiting is None else waiting.time_left_s,
        labels=labels,
        mlflow_url=_mlflow_url(row, mlflow),
        bundles=json.loads(row.bundles or "[]"),
        links=links_of(row.id),
    )
    return AblationPublic.model_validate(values)


def _mlflow_url(row: Row[Any], base: str) -> str | None:
    if row.mlflow_run_id is None:
        return None
    return links.of_run(base, row.mlflow_experiment_id, row.mlflow_run_id)


def block_public(row: Row[Any]) -> BlockPublic:
    """Build the wire type."""
    seed = row.seed if row.attempt_no else None
    return BlockPublic.model_validate(_fields(row, order=json.loads(row._mapping["order"]), seed=seed))


def trial_public(row: Row[Any]) -> TrialPublic:
    """Build the wire type."""
    values = _fields(row)
    progress = None if row.steps_done is None else Progress.model_validate(values)
    return TrialPublic.model_validate({**values, "progress": progress, "reason": _reason(row)})


def _reason(row: Row[Any]) -> str | None:
    """Return why a trial has no measurement, from its receipt or from its block that ended without one."""
    if row.unmeasured is not None:
        message: str | None = json.loads(row.unmeasured)["message"]
        return message
    return row.block_message if row.state in (TrialState.FAILED, TrialState.CANCELLED) else None


def event_public(row: Row[Any]) -> Event:
    """Build the wire type."""
    values = _fields(row, at=rfc3339(row.at), came_from=row.old, went_to=row.new, data=json.loads(row.data))
    return Event.model_validate(values)


def key_public(row: Row[Any]) -> KeyPublic:
    """Build the wire type."""
    return KeyPublic.model_validate(_fields(row))


def node_public(row: Row[Any], runs: list[dict[str, Any]], settings: ServiceSettings) -> NodePublic:
    """Build the wire type; `runs` are the node's running blocks."""
    registration = NodeRegistration.model_validate_json(row.registration)
    health = "live" if row.silent_s <= silent_limit_s(settings) else "silent"
    own = {"health": health, "state": _node_state(row, is_busy=bool(runs)), "lanes": registration.lanes, "runs": runs}
    own["devices_free"] = max(0, len(registration.devices) - sum(one["devices"] for one in runs))
    return NodePublic.model_validate({**registration.model_dump(), **_fields(row, **own)})


def _node_state(row: Row[Any], *, is_busy: bool) -> str:
    if row.revoked:
        return "revoked"
    if row.quarantined_reason is not None:
        return "quarantined"
    if row.draining:
        return "draining" if is_busy else "drained"
    return "works"


def token_public(row: Row[Any], *, secrets: list[SecretPublic], minutes: Minutes) -> TokenPublic:
    """Build the wire type from valid `secrets` and the device `minutes` of the token's ablations."""
    quota = {"device_minutes_used": minutes.used, "device_minutes_reserved": minutes.reserved}
    return TokenPublic.model_validate(_fields(row, secrets=secrets, **quota))


def secret_public(row: Row[Any]) -> SecretPublic:
    """Build the wire type."""
    return SecretPublic.model_validate(_fields(row))
