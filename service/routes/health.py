"""Routes for operators, without a token: liveness, readiness, metrics and versions."""

from http import HTTPStatus
from importlib.metadata import version

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from ablate.experiments.errors import SpecProblem
from ablate.experiments.records.receipts import SCHEMA_VERSION
from ablate.service.errors import Unavailable
from ablate.service.http.deps import ServicesDep
from ablate.service.http.metrics import DependencyCollector
from ablate.service.http.responses import problems
from ablate.service.schemas.public import Readiness, Version
from ablate.service.store.migrate import current_revision

router = APIRouter(tags=["health"])


@router.get("/healthz", operation_id="getHealth", summary="Is the process alive", response_class=PlainTextResponse)
async def get_health() -> str:
    """Answer."""
    return "ok"


@router.get("/readyz", operation_id="getReadiness", summary="What works and what does not", responses=problems(503))
async def get_readiness(request: Request) -> Readiness:
    """Check every dependency: 503 while the database cannot be read; `degraded` names the others that fail."""
    readiness = await _readiness(request)
    if not readiness.ready:
        failed = {name: check for name, check in readiness.checks.items() if not check.ok}
        named = [SpecProblem(pointer=f"#/checks/{name}", detail=check.detail) for name, check in failed.items()]
        raise Unavailable(f"not reachable: {', '.join(failed)}", problems=named)
    return readiness


async def _readiness(request: Request) -> Readiness:
    readiness: Readiness = await request.app.state.readiness.readiness()
    return readiness


@router.get(
    "/metrics",
    operation_id="getMetrics",
    summary="Prometheus metrics",
    response_class=PlainTextResponse,
    responses=problems(),
)
async def get_metrics(request: Request) -> Response:
    """Return request counters, queue depth, blocks by state, nodes, dependencies and the outbox's age."""
    dependencies = DependencyCollector((await _readiness(request)).checks)
    text = generate_latest() + generate_latest(dependencies) + await request.app.state.store_metrics.text()
    return Response(text, HTTPStatus.OK, media_type=CONTENT_TYPE_LATEST)


@router.get("/version", operation_id="getVersion", summary="Which code and schema answer", responses=problems())
def get_version(services: ServicesDep) -> Version:
    """Return the versions of code, database schema and receipts."""
    revision = current_revision(services.store)
    return Version(version=version("ablate"), schema_revision=revision or "none", receipt_schema=SCHEMA_VERSION)
