"""Routes that plan or submit a spec."""

import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request, Response
from sqlalchemy import Connection

from experiments.analysis.noise.admission import standing_problems
from experiments.analysis.proposals import refuse_session_key
from experiments.analysis.sizing import sizing_problems, with_number, workload_of
from experiments.design.config_fields import steps_of
from experiments.design.load import CONTENT_TYPES, parse_spec
from experiments.design.plan import Plan, make_plan, may_have_control, questions
from experiments.design.power import alpha_of
from experiments.design.problems import pointer
from experiments.design.spec import AblationSpec
from experiments.digest import digest, digest_bytes
from experiments.errors import SpecError, SpecProblem
from experiments.ids import IDEMPOTENCY_KEY, new_id
from experiments.records.calibration import Sizing
from experiments.records.circumstances import Family
from experiments.reporting import wording
from kernels.backends import NODE_CLASSES, NodeClass
from service.errors import Forbidden, IdempotencyInFlight
from service.http.deps import LongRoute, Reader, Services, ServicesDep, SpecBodyDep, Submitter
from service.http.openapi import JSON_EXAMPLE, YAML_EXAMPLE
from service.http.responses import etag_of, secured
from service.http.serializers import accepted_public, links_of, plan_public, silent_limit_s
from service.principals import Principal, Scope
from service.queue.plan_cost import check_budget, expected_device_minutes, warnings_of
from service.queue.waiting import EligibleNodes, eligible_nodes
from service.schemas.submissions import AblationAccepted, NodeClassAnswer, PlanPublic, SpecBody
from service.store.ablations.circumstances import family_if_asked_now
from service.store.ablations.code_archives import user_of
from service.store.ablations.quotas import check_quota, check_quota_for
from service.store.ablations.submissions import (
    IdempotencyKey,
    KeyUsed,
    StoredAnswer,
    Submission,
    find_answer,
    store_submission,
)
from service.store.nodes.calibrations import read_calibrations, read_sizing
from service.store.nodes.nodes import count_live

router = APIRouter(prefix="/v1", tags=["submissions"], route_class=LongRoute)

RETRY_AFTER_S = 1
_STEP_BYTES = 256
"""Most bytes of a step in a report, whose numbers have up to 17 digits."""
_TRACE_BYTES = 800_000
"""Most bytes of a profiled step over time: 4,000 names, each of 120 characters, and as many events."""
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
            if kind != "application/toml"
        }
        | {"application/toml": {"schema": {"type": "string"}}},
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
    if spec.design.blocks.auto:
        _, spec, plan = _numbered(services, body)
    else:
        plan = make_plan(spec)
    _check_reports(spec, plan, services.settings.max_report_bytes)
    if not _is_measured(services, spec, plan):
        plan = make_plan(spec, control=True)
    silent_s = silent_limit_s(services.settings)
    with services.store.read() as connection:
        _check_size(spec, read_sizing(connection, spec, plan))
        check_quota_for(connection, principal, spec.limits.device_minutes)
        nodes = eligible_nodes(connection, plan, silent_s=silent_s)
        family = family_if_asked_now(connection, questions(spec, plan))
        asking = max((family.number_of(arm.name) for arm in plan.variants), default=1)
        sizing = read_sizing(connection, spec, plan, asking=asking)
        minutes = expected_device_minutes(connection, plan)
        live = count_live(connection, silent_s=silent_s)
    answers = [_eligibility(entry, nodes, live.get(name, 0)) for name, entry in NODE_CLASSES.items()]
    return plan_public(spec, plan, expected_device_minutes=minutes, node_classes=answers, sizing=sizing, family=family)


def _numbered(services: Services, body: SpecBody) -> tuple[SpecBody, AblationSpec, Plan]:
    """Return a spec with `blocks: auto` with the number of blocks filled in, and its plan without a control.

    Raises SpecError, also for a number that takes more device minutes than the spec allows.
    """
    with services.store.read() as connection:
        calibrations = read_calibrations(connection)
    content, content_type = with_number(body.content, body.content_type, calibrations)
    spec = parse_spec(content, content_type)
    plan = make_plan(spec)
    with services.store.read() as connection:
        check_budget(connection, spec, plan)
    return SpecBody(content=content, content_type=content_type), spec, plan


def _eligibility(node_class: NodeClass, nodes: EligibleNodes, live: int) -> NodeClassAnswer:
    """Say whether nodes of a class could run a plan; only those of the class in its spec could."""
    if node_class.name != nodes.node_class:
        reason: str | None = f"the spec asks for node class '{nodes.node_class}'"
    else:
        live, reason = nodes.count, nodes.waits_for and f"it waits for {nodes.waits_for}"
    return NodeClassAnswer(node_class=node_class.name, live_nodes=live, eligible=reason is None, reason=reason)


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


def check_code_scope(spec: AblationSpec, principal: Principal) -> None:
    """Raise Forbidden for a spec with a command from a token that may not send code."""
    if spec.workload.command is not None and not principal.scope.includes(Scope.CODE):
        raise Forbidden(
            f"a spec with a command runs code on a node: this needs a token with scope '{Scope.CODE}'; "
            f"this one has '{principal.scope}'"
        )


def prepared(services: Services, body: SpecBody, spec: AblationSpec, principal: Principal) -> Submission:
    """Return the planned submission of `body`, parsed as `spec`. Raises SpecError and Forbidden."""
    check_code_scope(spec, principal)
    if spec.design.blocks.auto:
        body, spec, _ = _numbered(services, body)
    ablation_id = new_id("abl")
    measured = _is_measured(services, spec, make_plan(spec))
    control = _has_control(ablation_id, spec, services.settings.control_every, measured=measured)
    submission = Submission(
        ablation_id=ablation_id,
        spec=spec,
        plan=make_plan(spec, control=control),
        spec_text=body.content.decode(),
        content_type=body.content_type,
        submitted_by=principal.name,
        token_id=principal.token_id,
        code_user=user_of(principal),
    )
    _check_reports(spec, submission.plan, services.settings.max_report_bytes)
    return submission


def stored(
    services: Services,
    submission: Submission,
    key: IdempotencyKey,
    answer: StoredAnswer,
    principal: Principal,
    *,
    also: Callable[[Connection], None] = lambda _connection: None,
) -> StoredAnswer:
    """Store a submission with its answer and what `also` stores, all or nothing; return the answer to the key."""
    try:
        with services.store.write() as connection:
            _check_size(submission.spec, store_submission(connection, submission, key, answer))
            check_quota(connection, principal)
            also(connection)
    except KeyUsed:
        with services.store.read() as connection:
            earlier = find_answer(connection, key)
        if earlier is None:
            raise
        return earlier
    return answer


def accepted(services: Services, submission: Submission) -> AblationAccepted:
    """Return the answer to a submission."""
    plan = submission.plan
    with services.store.read() as connection:
        minutes = expected_device_minutes(connection, plan)
        silent_s = silent_limit_s(services.settings)
        waits_for = eligible_nodes(connection, plan, silent_s=silent_s).waits_for
        family = family_if_asked_now(connection, questions(submission.spec, plan))
    again = _asked_again(submission.spec, plan, family)
    warnings = [*warnings_of(submission.spec, minutes), *again, *_warnings(plan, waits_for)]
    return accepted_public(submission.ablation_id, plan, expected_device_minutes=minutes, warnings=warnings)


def _asked_again(spec: AblationSpec, plan: Plan, family: Family) -> Iterator[str]:
    """Yield the level of an asking that is not the first one of a question."""
    number = max((family.number_of(arm.name) for arm in plan.variants), default=1)
    if number > 1 and spec.verdict.session is None and not spec.verdict.primary.exact:
        level = wording.plain_percent(100 * alpha_of(number))
        yield f"asking {number} of this question, after '{family.earlier[-1].name}': it is tested at {level}"


def _warnings(plan: Plan, waits_for: str | None) -> Iterator[str]:
    if plan.control is not None:
        yield control_sentence(plan.control.name, len(plan.blocks))
    if waits_for is not None:
        yield f"it waits for {waits_for}"


def control_sentence(name: str, blocks: int) -> str:
    """Say that a plan has one more arm, what it is for and what it costs."""
    more = wording.counted(blocks, "trial")
    return f"arm '{name}' was added: it repeats the baseline, to measure the noise, {more} more"


def _has_control(ablation_id: str, spec: AblationSpec, every: int, *, measured: bool) -> bool:
    """Decide whether an ablation gets a control, which repeats the baseline; none where no metric has noise.

    It gets one if the noise of its workload is not `measured`, so that it may have a verdict by its own A/A blocks, and
    else by its id: one in `every`. 0 turns both off.
    """
    if not _may_have_control(spec, every):
        return False
    return not measured or int(digest(ablation_id).removeprefix("sha256:")[:16], 16) % every == 0


def _may_have_control(spec: AblationSpec, every: int) -> bool:
    return every > 0 and may_have_control(spec)


def _is_measured(services: Services, spec: AblationSpec, plan: Plan) -> bool:
    """Return whether a calibration admits a device to verdicts on this workload now."""
    if not _may_have_control(spec, services.settings.control_every):
        return True
    with services.store.read() as connection:
        calibrations = read_calibrations(connection, workload=workload_of(plan, spec))
    now = time.time()
    return any(next(standing_problems(one, now), None) is None for one in calibrations)


def _check_reports(spec: AblationSpec, plan: Plan, most_bytes: int) -> None:
    """Raise SpecError if the report of a block may be too large for the service, which would reject its results."""
    if NODE_CLASSES[plan.node_class].compiles_only:  # reports no steps
        return
    arms = 2 + len(spec.variants)  # with the control that an ablation may get
    steps = max(steps_of(arm.config).total for arm in plan.arms)
    profiled = spec.workload.profile or bool(spec.workload.require_kernels)
    most = max(0, most_bytes - profiled * arms * _TRACE_BYTES) // _STEP_BYTES
    if arms * steps > most:
        detail = (
            f"{arms} arms (with a control) of {steps:,} steps make block reports of up to "
            f"{arms * (steps * _STEP_BYTES + profiled * _TRACE_BYTES):,} bytes; "
            f"allowed: {most_bytes:,} (ABLATE_MAX_REPORT_BYTES)"
        )
        hint = f"at most {most // steps} arms, or {most // arms:,} steps"
        raise SpecError([SpecProblem(pointer=pointer("workload", "steps"), detail=detail, hint=hint)])


def _check_size(spec: AblationSpec, sizing: Sizing | None) -> None:
    """Raise SpecError, which undoes the submission, if its design cannot detect the effect that its rule asks for."""
    problems = sizing_problems(spec, sizing)
    if problems:
        raise SpecError(problems)


def _accepted(answer: StoredAnswer) -> Response:
    body = answer.text.encode()
    headers = {"Location": links_of(answer.ablation_id).self, "Retry-After": str(RETRY_AFTER_S), "ETag": etag_of(body)}
    return Response(body, HTTPStatus.ACCEPTED, headers, "application/json")
