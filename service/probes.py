"""Reach what the service needs, by the very names that are configured."""

from collections.abc import Callable

import httpx
from kombu.exceptions import OperationalError
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from experiments.runtime.wake import celery_app
from service.schemas import DependencyCheck
from service.settings import ServiceSettings
from service.store.session import Store

TIMEOUT_S = 2.0
MLFLOW_PATH = "/api/2.0/mlflow/experiments/get-by-name"
"""Not /health: that answers even to host names which the server refuses everywhere else."""


def check_all(store: Store, settings: ServiceSettings) -> dict[str, DependencyCheck]:
    """Try database, broker and MLflow."""
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
    with app.connection_for_write(connect_timeout=TIMEOUT_S) as connection:
        connection.ensure_connection(max_retries=1, interval_start=0, timeout=TIMEOUT_S, reraise_as_library_errors=True)
        return str(connection.as_uri())


def _mlflow(url: str) -> str:
    answer = httpx.get(
        url.rstrip("/") + MLFLOW_PATH, params={"experiment_name": "Default"}, timeout=TIMEOUT_S, trust_env=False
    )
    if answer.status_code != httpx.codes.NOT_FOUND:
        answer.raise_for_status()
    return url
