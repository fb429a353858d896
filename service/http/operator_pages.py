"""What operators may ask without a token, each made once for all who ask: readiness, metrics, version."""

import logging
from importlib.metadata import version as package_version

from anyio import CapacityLimiter, to_thread
from prometheus_client import generate_latest
from sqlalchemy.exc import SQLAlchemyError

from experiments.records.receipts import SCHEMA_VERSION
from service.http.metrics import PROCESS_REGISTRY, dependency_lines, registry_for
from service.http.readiness import ReadinessMonitor
from service.http.shared_answer import SharedAnswer
from service.schemas.health import Readiness, Version
from service.settings import ServiceSettings
from service.store.migrate import current_revision
from service.store.session import Store

log = logging.getLogger(__name__)

METRICS_FRESH_S = 2.0
VERSION_FRESH_S = 10.0


class OperatorPages:
    """Answers that cost the same for one caller and for hundreds, in threads that no other request needs."""

    def __init__(self, store: Store, settings: ServiceSettings) -> None:
        self._store = store
        self._store_registry = registry_for(store, settings)
        self._monitor = ReadinessMonitor(store, settings)
        self._threads = CapacityLimiter(2)
        self._of_store = SharedAnswer(self._store_metrics, fresh_s=METRICS_FRESH_S)
        self._version = SharedAnswer(self._make_version, fresh_s=VERSION_FRESH_S)

    async def readiness(self) -> Readiness:
        """Return what is reachable."""
        return await self._monitor.readiness()

    async def metrics(self) -> bytes:
        """Return all metrics in Prometheus' text form."""
        reachable = dependency_lines((await self._monitor.readiness()).checks)
        lines = generate_latest(PROCESS_REGISTRY) + reachable
        try:
            return lines + await self._of_store.get()
        except SQLAlchemyError as error:  # the rest says that the database is away
            log.warning("metrics without what is in the database: %s", error)
            return lines

    async def version(self) -> Version:
        """Return which code and schema answer."""
        return await self._version.get()

    async def _store_metrics(self) -> bytes:
        return await to_thread.run_sync(generate_latest, self._store_registry, limiter=self._threads)

    async def _make_version(self) -> Version:
        revision = await to_thread.run_sync(current_revision, self._store, limiter=self._threads)
        return Version(
            version=package_version("ablate"), schema_revision=revision or "none", receipt_schema=SCHEMA_VERSION
        )
