"""Run the background process, `python -m service.background.main`: one thread for each duty.

Several of these processes share the work: every duty has a lease that one of them holds, and all of them project,
each another ablation.
"""

import logging
import os
import select
import signal
import sys
import threading
import time

from sqlalchemy.exc import SQLAlchemyError

from experiments.reporting.mlflow.sink import Sink
from experiments.runtime.logs import configure_logging
from service.background.leadership import TICK_S, Duty, Keeper
from service.background.lease_alarm import Alarm, LeaseAlarm
from service.background.outbox_handlers import OutboxHandlers
from service.background.projector import Projector
from service.background.reconciler import Reconciler
from service.background.webhooks import webhook_of
from service.errors import ConfigurationError
from service.http.serializers import silent_limit_s
from service.lifecycle import OutboxKind
from service.queue.wake_ups import WakeResender
from service.settings import ServiceSettings, get_settings
from service.store.ablations.logs import Retention
from service.store.migrate import current_revision, newest_revision
from service.store.projections import PROJECTOR
from service.store.session import Store

log = logging.getLogger(__name__)

JOIN_S = 12.0
SCHEMA_PATIENCE_S = 60.0
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """SIGTERM and SIGINT as something to wait for; the first one stays.

    The interpreter writes to a pipe whichever thread the kernel hands the signal to: libraries start threads when they
    are imported, before this process could block a signal in them. After the first, more are ignored: at its end the
    interpreter gives handled signals, not ignored ones, their deadly default back.
    """

    def __init__(self) -> None:
        self._came, told = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self._ignore_more)

    @staticmethod
    def _ignore_more(_number: int, _frame: object) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def wait(self, patience_s: float | None = None) -> bool:
        """Return whether one came, within `patience_s` or ever."""
        return bool(select.select([self._came], [], [], patience_s)[0])


def threads(store: Store, settings: ServiceSettings, *, stop: threading.Event, alarm: Alarm) -> list[threading.Thread]:
    """Build the threads of this process: one for each duty, and the one that keeps their leases."""
    reconciler = Reconciler(
        store,
        sentinel_days=settings.sentinel_days,
        silent_s=silent_limit_s(settings),
        node_breaks=settings.node_breaks,
    )
    resender = WakeResender(store, settings.celery_url)
    sink = Sink(tracking_uri=settings.mlflow_url, experiment=settings.mlflow_experiment)
    projector = Projector(store, sink, lease_s=settings.projector_lease_s, alarm=alarm)
    handlers = OutboxHandlers(store, webhook_of(settings))

    def reconcile() -> bool:
        reconciler.tick()
        return False

    def judge() -> bool:
        done = [handlers.run_due(kind) for kind in (OutboxKind.LOOK, OutboxKind.JUDGE, OutboxKind.REPORT)]
        return any(done)  # one of each kind in turn: none waits until all of another are done

    def tell() -> bool:
        return handlers.run_due(OutboxKind.HOOK)

    works = {
        "reconciler": reconcile,
        "wakes": resender.run_due,
        "judge": judge,
        "webhooks": tell,
        "retention": Retention(store, age_s=settings.log_days * 86_400).round,
    }
    duties = [Duty(store, name, work, stop=stop) for name, work in works.items()]
    duties.append(Duty(store, PROJECTOR, projector.run_due, stop=stop, holder=projector.holder))
    keeper = Keeper([projector.renew, *(duty.renew for duty in duties), handlers.renew_holds], stop=stop)
    return [keeper.thread, *(duty.thread for duty in duties)]


def wait_for_schema(store: Store, signals: StopSignals) -> bool:
    """Wait until the API has migrated the database; return False when a signal to stop came first.

    Raises ConfigurationError when it is not migrated in time.
    """
    newest, deadline = newest_revision(), time.monotonic() + SCHEMA_PATIENCE_S
    current = current_revision(store)
    if current != newest:
        log.info("waiting for the API to migrate the database")
    while current != newest:
        if time.monotonic() > deadline:
            raise ConfigurationError(
                f"the database is at schema {current!r}, this code needs {newest!r}; "
                "start the API or run `python -m service.store.migrate`"
            )
        if signals.wait(TICK_S):
            return False
        current = current_revision(store)
    return True


def main() -> int:
    """Run until a signal; return 1 when the settings or the database do not allow a start."""
    signals = StopSignals()
    settings = get_settings()
    configure_logging(settings.log_format)
    try:
        store = Store(settings.sqlalchemy_url)
        if not wait_for_schema(store, signals):
            return 0
        stop = threading.Event()
        running = threads(store, settings, stop=stop, alarm=LeaseAlarm())
    except (ConfigurationError, SQLAlchemyError) as error:
        log.error("cannot start: %s", error)
        return 1
    for thread in running:
        thread.start()
    log.info("running: %s", ", ".join(thread.name for thread in running))
    signals.wait()
    stop.set()
    deadline = time.monotonic() + JOIN_S
    for thread in running:
        thread.join(max(0.0, deadline - time.monotonic()))
    store.close()
    log.info("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
