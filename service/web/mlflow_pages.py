"""MLflow's pages for people who are signed in: the API forwards what only reads, with the service's own password.

MLflow has one password, with which a caller may change everything, and it also starts programs. So only its pages'
requests that read runs pass. A session may read everything that the service itself wrote there.
"""

import re
from collections.abc import Iterable
from http import HTTPStatus
from urllib.parse import quote

import httpx
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from starlette.background import BackgroundTask

from ablate.experiments.system.http_clients import connection_options, reason
from ablate.experiments.system.setting_values import without_credentials
from ablate.service.errors import Forbidden, NotFound, Unavailable
from ablate.service.http.deps import ServicesDep
from ablate.service.http.links import below
from ablate.service.settings import MLFLOW_PAGES, ServiceSettings
from ablate.service.web.html import PageRoute
from ablate.service.web.sessions import ReadingVisitor

router = APIRouter(include_in_schema=False, route_class=PageRoute)

_ANSWER_S = 30.0
_OF_RUNS = "experiments|runs|metrics|artifacts|logged-models|registered-models|model-versions|traces|datasets"
_READS = {
    "GET": re.compile(
        r"(version|server-info|get-artifact|static-files/.+)?|"
        rf"ajax-api/\d\.0/mlflow/(server-info|({_OF_RUNS})(/.+)?)|ajax-api/2\.0/mlflow-artifacts/artifacts(/.+)?"
    ),
    "POST": re.compile(rf"graphql|ajax-api/\d\.0/mlflow/({_OF_RUNS})/(search[a-z-]*|metrics)"),
}
"""Paths of MLflow by method; its other ones change something, start programs or call other servers."""
_SENT = ("accept", "accept-encoding", "content-type", "if-none-match", "if-modified-since", "range")
_RECEIVED = (
    *("content-type", "content-length", "content-encoding", "content-range", "content-disposition"),
    *("accept-ranges", "etag", "last-modified"),
)
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; frame-src blob:; manifest-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of MLflow's pages, which are of one origin with ours."""
_FILE_POLICY = f"sandbox; {_POLICY}"
"""The same for files of runs: opened by themselves, they run no script."""


def mlflow_client(settings: ServiceSettings) -> httpx.AsyncClient:
    """Return the client that forwards requests."""
    url = settings.mlflow_url
    return httpx.AsyncClient(base_url=url, timeout=_ANSWER_S, **connection_options(url))


@router.get(MLFLOW_PAGES)
async def redirect_to_pages(visitor: ReadingVisitor) -> Response:
    """Add the slash without which relative addresses would be wrong; browsers keep the part after `#`."""
    return Response(None, HTTPStatus.PERMANENT_REDIRECT, {"Location": below(f"{MLFLOW_PAGES}/")})


@router.api_route(MLFLOW_PAGES + "/{path:path}", methods=["GET", "POST"])
async def forward(request: Request, path: str, services: ServicesDep, visitor: ReadingVisitor) -> Response:
    """Forward a request that reads to MLflow, and its answer to the visitor."""
    settings = services.settings
    if not settings.forward_mlflow:
        raise NotFound(f"this service does not forward MLflow; its pages are at {settings.mlflow_link_url}")
    if ".." in path.split("/") or not _READS[request.method].fullmatch(path):
        raise Forbidden("MLflow's pages are here to read; change runs with MLflow's own client and its password")
    client: httpx.AsyncClient = request.app.state.mlflow
    target = f"/{quote(path)}?{request.url.query}".rstrip("?")
    asked = client.build_request(
        request.method, target, headers=_chosen(request.headers.items(), _SENT), content=await request.body()
    )
    try:
        answer = await client.send(asked, stream=True)
    except httpx.HTTPError as error:
        address = without_credentials(settings.mlflow_url)
        raise Unavailable(f"MLflow at {address}: {reason(error, settings.mlflow_url)}") from error
    headers = dict(_chosen(answer.headers.items(), _RECEIVED))
    return StreamingResponse(
        answer.aiter_raw(), answer.status_code, headers | _own(path), background=BackgroundTask(answer.aclose)
    )


def _chosen(headers: Iterable[tuple[str, str]], names: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers if name.lower() in names]


def _own(path: str) -> dict[str, str]:
    """Return our headers for a path: MLflow's own files may be kept, since their names change with their content."""
    is_static = path.startswith("static-files/static/")
    is_file = "artifact" in path
    return {
        "Content-Security-Policy": _FILE_POLICY if is_file else _POLICY,
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "private, max-age=604800" if is_static else "no-store",
    }
