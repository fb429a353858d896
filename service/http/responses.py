"""Declarations of error answers in OpenAPI, and answers with an ETag or as a self-contained page."""

import hashlib
from http import HTTPStatus
from typing import Any

from fastapi import Request, Response
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from ablate.experiments.records.messages import PROBLEM_TYPES
from ablate.service.errors import title_of
from ablate.service.http.problems import MEDIA_TYPE
from ablate.service.schemas.problems import Problem, ProblemDetail

_EXAMPLES: dict[int, tuple[str, str]] = {
    400: (
        "missing-idempotency-key",
        "Header Idempotency-Key is missing; send a fresh random value.",
    ),
    401: ("unauthorized", "A valid bearer token is needed."),
    403: ("forbidden", "this needs a token with scope 'submit'; this one has 'read'"),
    404: ("not-found", "there is no ablation 'abl_01KAHZ3V5T8QW2R4Y6M9N0P1S3'"),
    405: ("method-not-allowed", "Method Not Allowed"),
    409: ("not-yet", "the ablation is running; its verdict is written when every block has ended"),
    413: ("body-too-large", "the body is larger than the 1048576 bytes allowed"),
    415: ("unsupported-media-type", "content type 'text/plain' is not supported; allowed: application/json"),
    422: ("invalid-spec", "the spec has 1 problem"),
    429: ("rate-limited", "this token sent more than 2000 requests per second; wait 1 s"),
    507: (
        "code-storage-full",
        "the archive has 1,048,576 bytes and the stored ones 4,294,000,000; allowed: 4,294,967,296",
    ),
    503: ("unavailable", "the database cannot be reached or is too busy"),
}
_UNKNOWN_GATE = ProblemDetail(
    pointer="#/variants/psiv-on/gates/psiv_cach",
    detail="unknown gate 'psiv_cach'; known: psiv_cache, schedule",
    hint="did you mean 'psiv_cache'?",
)


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Declare problem documents for `statuses` in OpenAPI, each with an example."""
    return {status: _declared(status) for status in sorted({*statuses, 429, 503})}


def secured(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Declare problem documents of a route that needs a token."""
    return problems(401, 403, *statuses)


def _declared(status: int) -> dict[str, Any]:
    slug, detail = _EXAMPLES[status]
    example = Problem(
        type=PROBLEM_TYPES + slug,
        title=title_of(status),
        status=status,
        detail=detail,
        instance="/v1/ablations",
        errors=(_UNKNOWN_GATE,) if status == HTTPStatus.UNPROCESSABLE_ENTITY else (),
        request_id="req_01KAHZ3V5T8QW2R4Y6M9N0P1S9",
    )
    content = {"schema": {"$ref": "#/components/schemas/Problem"}, "example": example.model_dump(mode="json")}
    return {"description": title_of(status), "content": {MEDIA_TYPE: content}}


def event_content(*schemas: type[BaseModel]) -> dict[str, Any]:
    """Return the content of a stream of server-sent events for OpenAPI; the data of each are one of `schemas`.

    OpenAPI 3.1 does not say how to describe a stream: some tools take a schema for the text, others for one event. So
    there is none, but an extension with the data of an event.
    """
    references = [{"$ref": f"#/components/schemas/{schema.__name__}"} for schema in schemas]
    return {"text/event-stream": {"x-event-data": {"anyOf": references}}}


def etag_of(body: bytes) -> str:
    """Return a strong entity tag of `body`."""
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def document(request: Request, content: BaseModel, *, headers: dict[str, str] | None = None) -> Response:
    """Send `content` as JSON with its ETag, or 304 when the client already has it."""
    body = content.model_dump_json().encode()
    tag = etag_of(body)
    cached_tags = {part.strip().removeprefix("W/") for part in request.headers.get("if-none-match", "").split(",")}
    all_headers = {**(headers or {}), "ETag": tag, "Cache-Control": "no-cache"}
    if tag in cached_tags or "*" in cached_tags:
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=all_headers)
    return Response(body, headers=all_headers, media_type="application/json")


_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""A report contains its style and pictures; it may run no script, load nothing and send nothing."""


def html_page(page: str) -> HTMLResponse:
    """Send a self-contained page with a policy that forbids everything else."""
    headers = {"Content-Security-Policy": _PAGE_POLICY, "Referrer-Policy": "no-referrer"}
    return HTMLResponse(page, headers=headers)
