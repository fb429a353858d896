"""Routes for operators: alive, ready, measured, which version. Strangers may ask; all who ask share one answer."""

from http import HTTPStatus

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from experiments.errors import SpecProblem
from service.errors import Unavailable
from service.http.operator_pages import OperatorPages
from service.http.responses import problems
from service.schemas.health import Readiness, Version

router = APIRouter(tags=["health"])


def _pages(request: Request) -> OperatorPages:
    pages: OperatorPages = request.app.state.operator_pages
    return pages


@router.get("/healthz", operation_id="getHealth", summary="Is the process alive", response_class=PlainTextResponse)
async def get_health() -> str:
    """Answer."""
    return "ok"


@router.get("/readyz", operation_id="getReadiness", summary="What works and what does not", responses=problems(503))
async def get_readiness(request: Request) -> Readiness:
    """Reach everything by its configured name: 503 where the database cannot be read, `degraded` names the rest."""
    found = await _pages(request).readiness()
    if not found.ready:
        failed = {name: check for name, check in found.checks.items() if not check.ok}
        named = [SpecProblem(pointer=f"#/checks/{name}", detail=check.detail) for name, check in failed.items()]
        raise Unavailable(f"not reachable: {', '.join(failed)}", problems=named)
    return found


@router.get(
    "/metrics",
    operation_id="getMetrics",
    summary="Prometheus metrics",
    response_class=PlainTextResponse,
    responses=problems(),
)
async def get_metrics(request: Request) -> Response:
    """Return request counters, queue depth, blocks by state, nodes, what is reachable and the outbox's age."""
    return Response(await _pages(request).metrics(), HTTPStatus.OK, media_type=CONTENT_TYPE_LATEST)


@router.get("/version", operation_id="getVersion", summary="Which code and schema answer", responses=problems())
async def get_version(request: Request) -> Version:
    """Return the versions of code, database schema and receipts."""
    return await _pages(request).version()
