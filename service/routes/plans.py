"""The route that registers a plan before it is carried to a node without a service."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from ablate.experiments.analysis.proposals import refuse_session_key
from ablate.experiments.design.rule import rule_digest
from ablate.experiments.errors import PlanFileError, SpecError, SpecProblem
from ablate.experiments.outcomes import SeedOrigin
from ablate.experiments.records.plan_file import PlanFile, differences, read_plan_file
from ablate.service.errors import Invalid
from ablate.service.http.deps import LongRoute, ServicesDep, Submitter, body_of_type
from ablate.service.http.responses import secured
from ablate.service.schemas.submissions import PlanRegistered
from ablate.service.store.questions import plans

router = APIRouter(prefix="/v1", tags=["submissions"], route_class=LongRoute)

_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "A plan file, as `ablate plan SPEC --out` makes it.",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}


async def _plan_body(request: Request) -> bytes:
    return await body_of_type(request, "application/json")


@router.post(
    "/plans:register",
    operation_id="registerPlan",
    summary="Register a plan that runs without a service",
    responses=secured(409, 413, 415, 422),
    openapi_extra=_BODY,
)
def register_plan(
    body: Annotated[bytes, Depends(_plan_body)], services: ServicesDep, principal: Submitter
) -> PlanRegistered:
    """Count the questions of a plan as asked from now on, and draw its seeds. Repeating it changes nothing."""
    file = _checked(body)
    return plans.register(services.store, file, by=principal.name)


def _checked(body: bytes) -> PlanFile:
    """Return a plan that this service would make from its spec. Raises Invalid, SpecError."""
    try:
        file = read_plan_file(body, to_register=True)
    except PlanFileError as error:
        raise Invalid(problems=[SpecProblem(pointer="#", detail=str(error))]) from error
    try:
        spec = file.spec
    except SpecError as error:
        problems = [SpecProblem(pointer="#/spec_text", detail=str(error))]
        raise Invalid("the plan's spec is not valid; nothing was registered", problems=problems) from error
    refuse_session_key(spec)
    if file.registered is not None or file.plan.seeds is SeedOrigin.DRAWN:
        detail = "the plan is registered, or has drawn seeds; a service draws them when it registers a plan"
        hint = "make a new one: ablate plan SPEC --out PLAN"
        raise Invalid(problems=[SpecProblem(pointer="#/plan/seeds", detail=detail, hint=hint)])
    changes = differences(file)
    if rule_digest(spec) != file.plan.rule_digest:
        changes.append(f"the rule is {rule_digest(spec)} here, {file.plan.rule_digest} in the plan")
    if changes:
        detail = f"this service would plan the spec differently: {'; '.join(changes)}; make the plan with its version"
        raise Invalid(problems=[SpecProblem(pointer="#/plan", detail=detail)])
    return file
