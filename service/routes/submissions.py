"""Routes that plan or submit a spec."""

from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request, Response

from ablate.experiments.analysis.proposals import refuse_session_key
from ablate.experiments.analysis.sizing import repeats_exactly, workload_of
from ablate.experiments.design.load import CONTENT_TYPES, parse_spec
from ablate.experiments.design.plan import controlled, questions
from ablate.experiments.digest import digest_bytes
from ablate.experiments.ids import IDEMPOTENCY_KEY
from ablate.experiments.node_classes import NODE_CLASSES
from ablate.service.errors import IdempotencyInFlight
from ablate.service.http.deps import LongRoute, Reader, Services, ServicesDep, SpecBodyDep, Submitter
from ablate.service.http.openapi import JSON_EXAMPLE, YAML_EXAMPLE
from ablate.service.http.responses import etag_of, secured
from ablate.service.http.serializers import links_of, plan_public, silent_limit_s
from ablate.service.principals import Principal, Scope
from ablate.service.queue.waiting import EligibleNodes, eligible_nodes
from ablate.service.schemas.submissions import AblationAccepted, NodeClassAnswer, PlanPublic, SpecBody
from ablate.service.store.ablations.device_minutes import check_quota_for, expected_device_minutes
from ablate.service.store.ablations.submissions import (
    IdempotencyKey,
    StoredAnswer,
    find_answer,
)
from ablate.service.store.nodes.calibrations import read_calibrations, read_sizing
from ablate.service.store.nodes.nodes import count_live
from ablate.service.store.questions.circumstances import family_if_asked_now
from ablate.service.submitting import (
    accepted,
    check_code_scope,
    check_reports,
    check_size,
    is_measured,
    planned,
    prepared,
    stored,
)

router = APIRouter(prefix="/v1", tags=["submissions"], route_class=LongRoute)

RETRY_AFTER_S = 1
IdempotencyHeader = Annotated[
    str,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        pattern=IDEMPOTENCY_KEY,
        description="A new random value; the same value with the same body gives the same answer.",
    ),
]
_SPEC = {"$ref": "#/components/schemas/AblationSpec"}
SPEC_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            kind: {"schema": _SPEC, "example": JSON_EXAMPLE if kind == "application/json" else YAML_EXAMPLE}
            for kind in CONTENT_TYPES
        },
    }
}
HEADERS = {
    "Location": {"description": "The ablation.", "schema": {"type": "string"}},
    "Retry-After": {"description": "Seconds until the next request is worthwhile.", "schema": {"type": "integer"}},
    "ETag": {"schema": {"type": "string"}},
}


@router.post(
    "/ablations:plan",
    operation_id="planAblation",
    summary="Plan a spec without running it",
    response_model=PlanPublic,
    responses=secured(413, 415, 422),
    openapi_extra=SPEC_BODY,
)
def plan_ablation(body: SpecBodyDep, services: ServicesDep, principal: Reader) -> PlanPublic:
    """Return arms, blocks, running order, eligible nodes, expected device minutes and the detectable effect.

    Refuses what a submission with the same token would refuse now.
    """
    spec = parse_spec(body.content, body.content_type)
    refuse_session_key(spec)
    if principal.scope.includes(Scope.SUBMIT):
        check_code_scope(spec, principal)
    _, _, spec, plan = planned(services, body, spec)
    check_reports(spec, plan, services.settings.max_report_bytes)
    silent_s = silent_limit_s(services.settings)
    with services.store.read() as connection:
        calibrations = read_calibrations(connection, workload=workload_of(plan, spec))
        if not is_measured(services, spec, calibrations):
            plan = controlled(spec, plan)
        check_size(spec, read_sizing(connection, spec, plan, calibrations))
        check_quota_for(connection, principal, spec.limits.device_minutes)
        nodes = eligible_nodes(connection, plan, silent_s=silent_s)
        family = family_if_asked_now(connection, questions(spec, plan))
        asking = max((family.number_of(arm.name) for arm in plan.variants), default=1)
        sizing = read_sizing(connection, spec, plan, calibrations, asking=asking)
        repeats = repeats_exactly(spec, plan, calibrations)
        minutes = expected_device_minutes(connection, plan)
        live = count_live(connection, silent_s=silent_s)
    names = dict.fromkeys([*NODE_CLASSES, *live, plan.node_class])
    answers = [_eligibility(name, nodes, live.get(name, 0)) for name in names]
    return plan_public(
        spec, plan, expected_device_minutes=minutes, node_classes=answers, sizing=sizing, family=family, repeats=repeats
    )


def _eligibility(node_class: str, nodes: EligibleNodes, live: int) -> NodeClassAnswer:
    """Say whether nodes of a class could run a plan; only those of the class in its spec could."""
    if node_class != nodes.node_class:
        reason: str | None = f"the spec asks for node class '{nodes.node_class}'"
    else:
        live, reason = nodes.count, nodes.waits_for and f"it waits for {nodes.waits_for}"
    return NodeClassAnswer(node_class=node_class, live_nodes=live, eligible=reason is None, reason=reason)


@router.post(
    "/ablations",
    operation_id="submitAblation",
    summary="Submit a spec",
    status_code=HTTPStatus.ACCEPTED,
    response_model=AblationAccepted,
    responses={
        202: {"description": "Stored; it runs when a node is free.", "headers": HEADERS},
        **secured(400, 409, 413, 415, 422),
    },
    openapi_extra=SPEC_BODY,
)
def submit_ablation(
    request: Request, body: SpecBodyDep, services: ServicesDep, principal: Submitter, idempotency_key: IdempotencyHeader
) -> Response:
    """Validate and plan the spec, then store it in one transaction; nothing is stored when anything is wrong."""
    spec = parse_spec(body.content, body.content_type)
    refuse_session_key(spec)
    key = key_of(principal, idempotency_key, body)

    def submit() -> StoredAnswer:
        submission = prepared(services, body, spec, principal)
        answer = StoredAnswer(ablation_id=submission.ablation_id, text=accepted(services, submission).model_dump_json())
        return stored(services, submission, key, answer, principal)

    return answered_once(services, key, submit)


def key_of(principal: Principal, idempotency_key: str, body: SpecBody, *, session: str = "") -> IdempotencyKey:
    """Return the key of a request with this body, to this session."""
    body_digest = digest_bytes(f"{body.content_type}{session and f' {session}'}".encode() + b"\0" + body.content)
    return IdempotencyKey(token_id=principal.token_id, key=idempotency_key, body_digest=body_digest)


def answered_once(services: Services, key: IdempotencyKey, submit: Callable[[], StoredAnswer]) -> Response:
    """Return the stored answer to `key`, otherwise that of `submit`. Raises IdempotencyInFlight while it runs."""
    in_flight = (key.token_id, key.key)
    if in_flight in services.in_flight:
        raise IdempotencyInFlight
    services.in_flight.add(in_flight)
    try:
        with services.store.read() as connection:
            earlier = find_answer(connection, key)
        answer = earlier or submit()
    finally:
        services.in_flight.discard(in_flight)
    services.wakes.notify()
    return _accepted(answer)


def _accepted(answer: StoredAnswer) -> Response:
    body = answer.text.encode()
    headers = {"Location": links_of(answer.ablation_id).self, "Retry-After": str(RETRY_AFTER_S), "ETag": etag_of(body)}
    return Response(body, HTTPStatus.ACCEPTED, headers, "application/json")
