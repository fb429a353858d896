"""Prometheus metrics: requests as they happen, the queue and the outbox as the database has them when asked."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import Connection

from experiments.records.calibration import Ledger
from service.http.serializers import silent_limit_s
from service.schemas.health import DependencyCheck
from service.settings import ServiceSettings
from service.store import leaders, outbox, projections
from service.store.ablations.ablations import count_by_state
from service.store.nodes import nodes
from service.store.nodes.calibrations import read_ledger
from service.store.session import Store
from service.store.tables import ablations, attempts, blocks

REQUESTS = Counter("ablate_requests_total", "Requests answered.", ["method", "route", "status"])
SECONDS = Histogram("ablate_request_seconds", "Seconds until the answer was sent.", ["route"])


@lru_cache(maxsize=2048)
def _children(method: str, route: str, status: int) -> tuple[Any, Any]:
    return REQUESTS.labels(method, route, str(status)), SECONDS.labels(route)


def observe_request(scope: Mapping[str, Any], status: int, seconds: float) -> None:
    """Count one answered request under its route's template."""
    route = getattr(scope.get("route"), "path_format", "unmatched")
    counter, histogram = _children(scope["method"], route, status)
    counter.inc()
    histogram.observe(seconds)


class StoreCollector(Collector):
    """Gauges read from the database at the moment of the scrape."""

    def __init__(self, store: Store, settings: ServiceSettings) -> None:
        self._store = store
        self._silent_s = silent_limit_s(settings)

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges."""
        with self._store.read() as connection:
            yield from _states(connection)
            yield from _backlog(connection)
            yield _nodes(connection, self._silent_s)
            yield _duties(connection)
            yield _projectors(connection)
            yield from _ledger(read_ledger(connection))


def _states(connection: Connection) -> Iterator[Metric]:
    """Yield how many ablations, blocks and attempts are in each state."""
    for table in (ablations, blocks, attempts):
        gauge = GaugeMetricFamily(f"ablate_{table.name}", f"Rows of {table.name} by state.", labels=["state"])
        for state, count in count_by_state(connection, table).items():
            gauge.add_metric([state], count)
        yield gauge


def _backlog(connection: Connection) -> Iterator[Metric]:
    """Yield how much waits in the outbox, and for how long."""
    rows = GaugeMetricFamily("ablate_outbox_rows", "Outbox rows not handled yet.", labels=["kind"])
    age = GaugeMetricFamily("ablate_outbox_oldest_seconds", "Age of the oldest row.", labels=["kind"])
    for kind, count, oldest_s in outbox.backlog(connection):
        rows.add_metric([kind], count)
        age.add_metric([kind], oldest_s)
    yield rows
    yield age


def _ledger(ledger: Ledger) -> Iterator[Metric]:
    """Yield the service's own rate of false words, as far as A/A ablations support it."""
    yield GaugeMetricFamily("ablate_aa_ablations", "Disjoint A/A ablations judged.", value=ledger.ablations)
    yield GaugeMetricFamily("ablate_aa_false_words", "Those called better or worse.", value=ledger.false_words)
    what = "Upper 95 % bound of the rate of false words (Clopper and Pearson)."
    yield GaugeMetricFamily("ablate_false_word_rate_bound", what, value=ledger.upper_bound)


def _nodes(connection: Connection, silent_s: float) -> Metric:
    """Return the number of nodes by class, live and silent."""
    gauge = GaugeMetricFamily("ablate_nodes", "Nodes that ever registered.", labels=["node_class", "health"])
    live, all_of = (nodes.count_live(connection, silent_s=limit) for limit in (silent_s, nodes.EVER_S))
    for node_class, count in sorted(all_of.items()):
        heard = live.get(node_class, 0)
        gauge.add_metric([node_class, "live"], heard)
        gauge.add_metric([node_class, "silent"], count - heard)
    return gauge


def _duties(connection: Connection) -> Metric:
    """Return which duties of the background process somebody holds."""
    gauge = GaugeMetricFamily("ablate_duty_held", "Whether a background process holds the duty.", labels=["duty"])
    lapsed = leaders.lapsed_duties(connection)
    for duty in leaders.DUTIES:
        gauge.add_metric([duty], float(duty not in lapsed))
    return gauge


def _projectors(connection: Connection) -> Metric:
    """Return what every living projector is behind with."""
    what = "Age of the oldest outbox row that a projector answers now; 0 when it has none in hand."
    gauge = GaugeMetricFamily("ablate_projector_lag_seconds", what, labels=["projector"])
    for holder, lag_s in sorted(projections.lags(connection).items()):
        gauge.add_metric([holder], lag_s)
    return gauge


def dependency_lines(checks: Mapping[str, DependencyCheck]) -> bytes:
    """Return what was found reachable, in Prometheus' text form."""
    gauge = GaugeMetricFamily("ablate_dependency_up", "Whether the service reaches it.", labels=["dependency"])
    for name, check in checks.items():
        gauge.add_metric([name], float(check.ok))
    registry = CollectorRegistry()
    registry.register(_Ready(gauge))
    return generate_latest(registry)


class _Ready(Collector):
    """A gauge that has its values already."""

    def __init__(self, gauge: Metric) -> None:
        self._gauge = gauge

    def collect(self) -> Iterator[Metric]:
        """Yield it."""
        yield self._gauge


def registry_for(store: Store, settings: ServiceSettings) -> CollectorRegistry:
    """Return a registry with this store's gauges, to be scraped together with the process's own metrics."""
    registry = CollectorRegistry()
    registry.register(StoreCollector(store, settings))
    return registry


PROCESS_REGISTRY = REGISTRY
"""Request counters and the process's own metrics."""
