"""Turn errors into RFC 9457 problem documents: ours, the framework's, and the ones nobody expected."""

import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException

from experiments.errors import SpecError, SpecProblem
from service.errors import Invalid, MissingIdempotencyKey, ServiceError, Unavailable, title_of
from service.schemas.problems import Problem, ProblemDetail

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:ablate:problem:"
_SLUGS = {
    HTTPStatus.NOT_FOUND: "not-found",
    HTTPStatus.METHOD_NOT_ALLOWED: "method-not-allowed",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "body-too-large",
}


def install(app: FastAPI) -> None:
    """Register the handlers."""
    app.add_exception_handler(ServiceError, _service_error)
    app.add_exception_handler(SpecError, _spec_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    for kind in (OperationalError, InterfaceError, PoolTimeout):
        app.add_exception_handler(kind, _database_error)
    app.add_exception_handler(Exception, _unexpected_error)


def problem(
    request: Request,
    status: int,
    slug: str,
    detail: str,
    *,
    problems: Sequence[SpecProblem] = (),
    headers: dict[str, str] | None = None,
) -> Response:
    """Build the answer."""
    request_id = request.scope.get("state", {}).get("request_id", "")
    body = Problem(
        type=TYPE_PREFIX + slug,
        title=title_of(status),
        status=status,
        detail=detail,
        instance=request.url.path,
        errors=tuple(ProblemDetail.of(problem) for problem in problems),
        request_id=request_id,
    )
    headers = {**(headers or {}), "X-Request-Id": request_id}
    return Response(body.model_dump_json(), status, headers, MEDIA_TYPE)


def _from_service_error(request: Request, error: ServiceError) -> Response:
    return problem(request, error.status, error.slug, str(error), problems=error.problems, headers=error.headers)


async def _service_error(request: Request, error: Any) -> Response:
    return _from_service_error(request, error)


async def _spec_error(request: Request, error: Any) -> Response:
    count = len(error.problems)
    detail = f"the spec has {count} problem{'s' if count != 1 else ''}"
    return problem(request, HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-spec", detail, problems=error.problems)


async def _validation_error(request: Request, error: Any) -> Response:
    found = error.errors()
    if any(item["loc"] == ("header", "Idempotency-Key") and item["type"] == "missing" for item in found):
        return _from_service_error(request, MissingIdempotencyKey())
    return _from_service_error(request, Invalid(problems=[_translate(item) for item in found]))


def _translate(item: dict[str, Any]) -> SpecProblem:
    place, *rest = item["loc"]
    if item["type"] == "json_invalid":
        return SpecProblem(pointer="#", detail=f"the body is not JSON: {item['ctx']['error']} at character {rest[-1]}")
    name = "/".join(str(part).replace("~", "~0").replace("/", "~1") for part in rest)
    pointer = f"#/{name}" if place == "body" and rest else "#" if place == "body" else f"{place}:{name}"
    message = str(item["msg"])
    return SpecProblem(pointer=pointer, detail=message[:1].lower() + message[1:])


async def _http_error(request: Request, error: Any) -> Response:
    if error.status_code == HTTPStatus.BAD_REQUEST:  # the framework's word for a body that cannot be decoded
        detail = f"the body cannot be read: {error.__cause__ or error.detail}"
        return _from_service_error(request, Invalid(problems=[SpecProblem(pointer="#", detail=detail)]))
    slug = _SLUGS.get(error.status_code, "http")
    return problem(request, error.status_code, slug, str(error.detail), headers=dict(error.headers or {}))


async def _database_error(request: Request, error: Any) -> Response:
    log.warning("database unavailable: %s", error)
    unavailable = Unavailable("the database cannot be reached or is too busy", headers={"Retry-After": "1"})
    return _from_service_error(request, unavailable)


async def _unexpected_error(request: Request, error: Exception) -> Response:
    log.error("unexpected error in %s %s", request.method, request.url.path, exc_info=error)
    detail = "an unexpected error was recorded; tell an operator the request id"
    return problem(request, HTTPStatus.INTERNAL_SERVER_ERROR, "internal", detail)
