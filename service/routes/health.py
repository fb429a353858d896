"""Routes for operators: alive, ready, measured, which version."""

from collections.abc import Callable
from http import HTTPStatus
from importlib.metadata import version as package_version

import httpx
from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from kombu.exceptions import OperationalError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from experiments.errors import SpecProblem
from experiments.records.receipts import SCHEMA_VERSION
from experiments.runtime.wake import celery_app
from service.deps import ServicesDep
from service.errors import Unavailable
from service.metrics import PROCESS_REGISTRY
from service.responses import problems
from service.schemas.health import DependencyCheck, Readiness, Version
from service.settings import ServiceSettings
from service.store.migrate import current_revision
from service.store.session import Store

router = APIRouter(tags=["health"])

_TIMEOUT_S = 2.0
_MLFLOW_PATH = "/api/2.0/mlflow/experiments/get-by-name"
"""Not /health: that answers even to host names which the server refuses everywhere else."""


@router.get("/healthz", operation_id="getHealth", summary="Is the process alive", response_class=PlainTextResponse)
async def get_health() -> str:
    """Answer."""
    return "ok"


@router.get("/readyz", operation_id="getReadiness", summary="Is everything reachable", responses=problems(503))
def get_readiness(services: ServicesDep) -> Readiness:
    """Reach database, broker and MLflow by the names that are configured; 503 names the ones that fail."""
    checks = _check_all(services.store, services.settings)
    failed = {name: check for name, check in checks.items() if not check.ok}
    if failed:
        found = [SpecProblem(pointer=f"#/checks/{name}", detail=check.detail) for name, check in failed.items()]
        raise Unavailable(f"not reachable: {', '.join(failed)}", problems=found)
    return Readiness(ready=True, checks=checks)


def _check_all(store: Store, settings: ServiceSettings) -> dict[str, DependencyCheck]:
    """Try to reach database, broker and MLflow, by the very names that are configured."""
    return {
        "database": _check(lambda: _database(store)),
        "broker": _check(lambda: _broker(settings.celery_url)),
        "mlflow": _check(lambda: _mlflow(settings.mlflow_url)),
    }


def _check(probe: Callable[[], str]) -> DependencyCheck:
    try:
        return DependencyCheck(ok=True, detail=probe())
    except (SQLAlchemyError, OperationalError, httpx.HTTPError, OSError) as error:
        return DependencyCheck(ok=False, detail=f"{type(error).__name__}: {error}"[:500])


def _database(store: Store) -> str:
    with store.read() as connection:
        connection.execute(text("SELECT 1"))
    return store.writer.dialect.name


def _broker(url: str) -> str:
    app = celery_app(url, name="ablate-probe")
    with app.connection_for_write(connect_timeout=_TIMEOUT_S) as connection:
        connection.ensure_connection(
            max_retries=1, interval_start=0, timeout=_TIMEOUT_S, reraise_as_library_errors=True
        )
        return str(connection.as_uri())


def _mlflow(url: str) -> str:
    answer = httpx.get(
        url.rstrip("/") + _MLFLOW_PATH, params={"experiment_name": "Default"}, timeout=_TIMEOUT_S, trust_env=False
    )
    if answer.status_code != httpx.codes.NOT_FOUND:
        answer.raise_for_status()
    return url


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
