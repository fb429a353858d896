"""Turn errors into RFC 9457 problem documents: our own, the framework's, and unexpected ones."""

import logging
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import DBAPIError, InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from ablate.experiments.design.problems import listed, nearest, shown
from ablate.experiments.errors import SpecError, SpecProblem
from ablate.experiments.ids import RULES
from ablate.experiments.records.messages import PROBLEM_TYPES
from ablate.experiments.system.logs import requested_by
from ablate.service.errors import Invalid, MissingIdempotencyKey, ServiceError, Unavailable, title_of
from ablate.service.schemas.problems import Problem, ProblemDetail
from ablate.service.store.session import is_cut_off, is_read_only

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
_SLUGS = {
    HTTPStatus.NOT_FOUND: "not-found",
    HTTPStatus.METHOD_NOT_ALLOWED: "method-not-allowed",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "body-too-large",
    HTTPStatus.SERVICE_UNAVAILABLE: "unavailable",
}
_METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")
_CLIENT_LEFT = 499
"""Status for the metrics only; the client is gone."""


def install(app: FastAPI) -> None:
    """Register the handlers."""
    for kind in ANSWERED:
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(Exception, unexpected_error)


async def answer(request: Request, error: Exception) -> Response:
    """Return the answer to an error of one of the `ANSWERED` kinds."""
    handler = next(handler for kind, handler in _HANDLERS.items() if isinstance(error, kind))
    return handler(request, error)


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
        type=PROBLEM_TYPES + slug,
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


def _spec_error(request: Request, error: Any) -> Response:
    count = len(error.problems)
    detail = f"the spec has {count} problem{'s' if count != 1 else ''}"
    return problem(request, HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-spec", detail, problems=error.problems)


def _validation_error(request: Request, error: Any) -> Response:
    errors = error.errors()
    if any(item["loc"] == ("header", "Idempotency-Key") and item["type"] == "missing" for item in errors):
        return _from_service_error(request, MissingIdempotencyKey())
    return _from_service_error(request, Invalid(problems=[_translate(item) for item in errors]))


def _translate(item: dict[str, Any]) -> SpecProblem:
    place, *rest = item["loc"]
    if item["type"] == "json_invalid":
        return SpecProblem(pointer="#", detail=f"the body is not JSON: {item['ctx']['error']} at character {rest[-1]}")
    name = "/".join(str(part).replace("~", "~0").replace("/", "~1") for part in rest)
    pointer = f"#/{name}" if place == "body" and rest else "#" if place == "body" else f"{place}:{name}"
    rule = RULES.get(item["ctx"]["pattern"]) if item["type"] == "string_pattern_mismatch" else None
    if rule is not None:
        return SpecProblem(pointer=pointer, detail=f"{shown(item['input'])} is not allowed; allowed: {rule}")
    message = str(item["msg"])
    return SpecProblem(pointer=pointer, detail=message[:1].lower() + message[1:])


def _http_error(request: Request, error: Any) -> Response:
    if isinstance(error.__cause__, ClientDisconnect):
        return _client_left(request, error)
    if error.status_code == HTTPStatus.BAD_REQUEST:  # the framework raises it for a body that it cannot decode
        detail = f"the body cannot be read: {error.__cause__ or error.detail}"
        return _from_service_error(request, Invalid(problems=[SpecProblem(pointer="#", detail=detail)]))
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(_allowed_methods(request))
    slug = _SLUGS.get(error.status_code, "http")
    return problem(request, error.status_code, slug, str(error.detail), headers=headers)


def _allowed_methods(request: Request) -> list[str]:
    """Return the methods of all routes with this path; the framework returns only those of the first."""
    scope = {"type": "http", "path": request.scope["path"], "root_path": request.scope.get("root_path", "")}
    routes = request.app.routes
    return [
        method
        for method in _METHODS
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in routes)
    ]


def _client_left(request: Request, _error: Any) -> Response:
    """Log that the client closed the connection, which is no error."""
    log.info("%s %a: the client went away before its request was whole", request.method, request.url.path)
    return Response(status_code=_CLIENT_LEFT)


def _database_error(request: Request, error: Any) -> Response:
    read_only = is_read_only(error.orig) if isinstance(error, DBAPIError) else False
    if isinstance(error, InternalError) and not (read_only or is_cut_off(error.orig)):
        raise error
    what = "takes no changes now; stored data can be read" if read_only else "cannot be reached or is too busy"
    log.warning(
        "the database %s: %s", what, getattr(error, "orig", None) or error
    )  # without the statement and its values
    return _from_service_error(request, Unavailable(f"the database {what}", headers={"Retry-After": "1"}))


async def unexpected_error(request: Request, error: Exception) -> Response:
    """Log our own mistake and answer without details."""
    with requested_by(request.scope.get("state", {}).get("request_id")):
        log.error("unexpected error in %s %a", request.method, request.url.path, exc_info=error)
    detail = "an unexpected error was recorded; tell an operator the request id"
    return problem(request, HTTPStatus.INTERNAL_SERVER_ERROR, "internal", detail)


_HANDLERS: dict[type[Exception], Callable[[Request, Any], Response]] = {
    ServiceError: _from_service_error,
    SpecError: _spec_error,
    RequestValidationError: _validation_error,
    HTTPException: _http_error,
    ClientDisconnect: _client_left,
    OperationalError: _database_error,
    InterfaceError: _database_error,
    InternalError: _database_error,
    PoolTimeout: _database_error,
}
ANSWERED: tuple[type[Exception], ...] = tuple(_HANDLERS)
"""Errors with a planned answer; any other is our own mistake."""


def check_known(what: str, name: str, names: Sequence[str], labels: Mapping[str, str] | None = None) -> None:
    """Raise Invalid, with the known `names`, unless `name` is one of them."""
    if name not in names:
        detail = f"unknown {what.replace('_', ' ')} {shown(name)}; known: {listed(names)}"
        raise Invalid(problems=[SpecProblem(pointer=f"#/{what}", detail=detail, hint=nearest(name, names, labels))])
