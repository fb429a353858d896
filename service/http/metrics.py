"""Prometheus metrics: counters of requests, and gauges of the queue and the outbox read from the database."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from anyio import CapacityLimiter, to_thread
from prometheus_client import Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from ablate.experiments.records.calibration import Ledger
from ablate.service.http.readiness import SharedAnswer
from ablate.service.http.serializers import silent_limit_s
from ablate.service.queue.waiting import demand
from ablate.service.schemas.public import DependencyCheck
from ablate.service.settings import ServiceSettings
from ablate.service.store import leaders, outbox
from ablate.service.store.ablations.ablations import count_by_state
from ablate.service.store.files import code_archives
from ablate.service.store.nodes import nodes
from ablate.service.store.nodes.calibrations import read_ledger
from ablate.service.store.session import Store
from ablate.service.store.tables import ablations, attempts, blocks

log = logging.getLogger(__name__)

REQUESTS = Counter("ablate_requests_total", "Requests answered.", ["method", "route", "status"])
SECONDS = Histogram("ablate_request_seconds", "Seconds until the answer was sent.", ["route"])


def observe_request(scope: Mapping[str, Any], status: int, seconds: float) -> None:
    """Count one answered request under its route's template."""
    route = getattr(scope.get("route"), "path_format", "unmatched")
    REQUESTS.labels(scope["method"], route, str(status)).inc()
    SECONDS.labels(route).observe(seconds)


class StoreCollector(Collector):
    """Gauges read from the database."""

    def __init__(self, store: Store, settings: ServiceSettings) -> None:
        self._store = store
        self._silent_s = silent_limit_s(settings)
        self._lease_s = settings.projector_lease_s

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges."""
        with self._store.read() as connection:
            yield from _states(connection)
            yield from _backlog(connection)
            yield _nodes(connection, self._silent_s)
            yield from _waiting(connection, self._silent_s)
            yield _duties(connection, self._lease_s)
            yield from _ledger(read_ledger(connection))
            yield from _code(connection)


def _states(connection: Connection) -> Iterator[Metric]:
    """Yield how many ablations, blocks and attempts are in each state."""
    for table in (ablations, blocks, attempts):
        gauge = GaugeMetricFamily(f"ablate_{table.name}", f"Rows of {table.name} by state.", labels=["state"])
        for state, count in count_by_state(connection, table).items():
            gauge.add_metric([state], count)
        yield gauge


def _backlog(connection: Connection) -> Iterator[Metric]:
    """Yield the number of waiting outbox rows and the age of the oldest."""
    rows = GaugeMetricFamily("ablate_outbox_rows", "Outbox rows not handled yet.", labels=["kind"])
    age = GaugeMetricFamily("ablate_outbox_oldest_seconds", "Age of the oldest row.", labels=["kind"])
    for kind, count, oldest_s in outbox.backlog(connection):
        rows.add_metric([kind], count)
        age.add_metric([kind], oldest_s)
    yield rows
    yield age


def _ledger(ledger: Ledger) -> Iterator[Metric]:
    """Yield the service's own rate of false verdicts, from its A/A ablations."""
    yield GaugeMetricFamily("ablate_aa_ablations", "Disjoint A/A ablations judged.", value=ledger.ablations)
    yield GaugeMetricFamily("ablate_aa_false_words", "Those called better or worse.", value=ledger.false_words)
    what = "Upper 95 % bound of the rate of false verdicts (Clopper and Pearson)."
    yield GaugeMetricFamily("ablate_false_word_rate_bound", what, value=ledger.upper_bound)


def _code(connection: Connection) -> Iterator[Metric]:
    """Yield the size of the code that people sent."""
    count, size = code_archives.totals(connection)
    yield GaugeMetricFamily("ablate_code_archives", "Archives of code that are stored.", value=count)
    yield GaugeMetricFamily("ablate_code_bytes", "Their bytes; ABLATE_MAX_CODE_BYTES limits them.", value=size)


def _nodes(connection: Connection, silent_s: float) -> Metric:
    """Return the number of nodes by class, live and silent."""
    gauge = GaugeMetricFamily("ablate_nodes", "Nodes that ever registered.", labels=["node_class", "health"])
    live, registered = (nodes.count_live(connection, silent_s=limit) for limit in (silent_s, nodes.EVER_S))
    for node_class, count in sorted(registered.items()):
        num_live = live.get(node_class, 0)
        gauge.add_metric([node_class, "live"], num_live)
        gauge.add_metric([node_class, "silent"], count - num_live)
    return gauge


def _waiting(connection: Connection, silent_s: float) -> Iterator[Metric]:
    """Yield the device minutes that wait, and the nodes that may run them; no value where nothing waits."""
    labels = ["node_class", "devices", "nodes_each"]
    minutes = GaugeMetricFamily("ablate_waiting_device_minutes", "Expected of the queued blocks.", labels=labels)
    able = GaugeMetricFamily("ablate_waiting_nodes", "Nodes that may run one of these blocks now.", labels=labels)
    for row in demand(connection, silent_s=silent_s):
        kind = [row.node_class, str(row.devices), str(row.nodes_each)]
        minutes.add_metric(kind, row.device_minutes)
        able.add_metric(kind, row.nodes)
    yield minutes
    yield able


def _duties(connection: Connection, lease_s: float) -> Metric:
    """Return whether a background process leads, for each of its duties."""
    gauge = GaugeMetricFamily("ablate_duty_held", "Whether a background process does the duty.", labels=["duty"])
    leads = leaders.has_leader(connection, lease_s=lease_s)
    for duty in leaders.DUTIES:
        gauge.add_metric([duty], float(leads))
    return gauge


class StoreMetrics:
    """The gauges from the database in Prometheus' text form, one answer for all callers within two seconds."""

    def __init__(self, store: Store, settings: ServiceSettings) -> None:
        self._collector = StoreCollector(store, settings)
        self._shared = SharedAnswer(self._read)
        self._thread = CapacityLimiter(1)

    async def text(self) -> bytes:
        """Return the gauges; nothing while the database cannot be read."""
        return await self._shared.get()

    async def _read(self) -> bytes:
        try:
            return await to_thread.run_sync(generate_latest, self._collector, limiter=self._thread)
        except SQLAlchemyError as error:  # the gauge of dependencies shows that the database is away
            log.warning("metrics without the gauges from the database: %s", error)
            return b""


class DependencyCollector(Collector):
    """The gauge of dependencies, from the results of readiness checks."""

    def __init__(self, checks: Mapping[str, DependencyCheck]) -> None:
        self._checks = checks

    def collect(self) -> Iterator[Metric]:
        """Yield the gauge."""
        gauge = GaugeMetricFamily("ablate_dependency_up", "Whether the service reaches it.", labels=["dependency"])
        for name, check in self._checks.items():
            gauge.add_metric([name], float(check.ok))
        yield gauge
