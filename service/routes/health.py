"""Routes for operators: alive, ready, measured, which version."""

from http import HTTPStatus
from importlib.metadata import version as package_version

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from experiments.errors import SpecProblem
from experiments.records.receipts import SCHEMA_VERSION
from service.deps import ServicesDep
from service.errors import Unavailable
from service.metrics import PROCESS_REGISTRY
from service.probes import check_all
from service.responses import problems
from service.schemas import Readiness, Version
from service.store.migrate import current_revision

router = APIRouter(tags=["health"])


@router.get("/healthz", operation_id="getHealth", summary="Is the process alive", response_class=PlainTextResponse)
async def get_health() -> str:
    """Answer."""
    return "ok"


@router.get("/readyz", operation_id="getReadiness", summary="Is everything reachable", responses=problems(503))
def get_readiness(services: ServicesDep) -> Readiness:
    """Reach database, broker and MLflow by the names that are configured; 503 names the ones that fail."""
    checks = check_all(services.store, services.settings)
    failed = {name: check for name, check in checks.items() if not check.ok}
    if failed:
        found = [SpecProblem(pointer=f"#/checks/{name}", detail=check.detail) for name, check in failed.items()]
        raise Unavailable(f"not reachable: {', '.join(failed)}", problems=found)
    return Readiness(ready=True, checks=checks)


@router.get(
    "/metrics",
    operation_id="getMetrics",
    summary="Prometheus metrics",
    response_class=PlainTextResponse,
    responses=problems(),
)
def get_metrics(request: Request) -> Response:
    """Return request counters, queue depth, blocks by state, attempts and the outbox's age."""
    own = generate_latest(request.app.state.store_registry)
    return Response(generate_latest(PROCESS_REGISTRY) + own, HTTPStatus.OK, media_type=CONTENT_TYPE_LATEST)


@router.get("/version", operation_id="getVersion", summary="Which code and schema answer", responses=problems())
def get_version(services: ServicesDep) -> Version:
    """Return the versions of code, database schema and receipts."""
    return Version(
        version=package_version("ablate"),
        schema_revision=current_revision(services.store) or "none",
        receipt_schema=SCHEMA_VERSION,
    )
