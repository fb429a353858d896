"""Run the background process, `python -m ablate.service.background.main`: one thread for each duty.

Of several such processes one leads and does all duties. The others stand by.
"""

import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from ablate.experiments.reporting.mlflow.sink import Sink
from ablate.experiments.system.logs import configure_logging
from ablate.service.background.leader import ROUND_S, TICK_S, Leader, LeaderStore, duty
from ablate.service.background.notifications import Notifier, mailer_of
from ablate.service.background.outbox_handlers import OutboxHandlers
from ablate.service.background.projector import Projector
from ablate.service.background.reconciler import Reconciler
from ablate.service.background.webhooks import webhook_of
from ablate.service.errors import ConfigurationError
from ablate.service.http.serializers import silent_limit_s
from ablate.service.lifecycle import OutboxKind
from ablate.service.queue.wake_ups import WakeResender
from ablate.service.settings import ServiceSettings, get_settings
from ablate.service.store.files.code_archives import drop_oldest
from ablate.service.store.files.logs import drop_logs
from ablate.service.store.migrate import current_revision, newest_revision
from ablate.service.store.session import Store

log = logging.getLogger(__name__)

JOIN_S = 12.0
"""How long a signal to stop lets work in progress finish."""
LAST_CALL_S = 40.0
"""How long a process that lost the lead waits for its last MLflow call: two tries and a pause."""
SCHEMA_PATIENCE_S = 60.0
REST_S = 600.0
"""Pause after a round that found nothing to drop."""
ALIVE = "background-alive"
"""File in the state folder for the health check of containers: its age shows whether the process stands still."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """SIGTERM and SIGINT as something to wait for; the first one stays.

    The interpreter writes to a pipe, whichever thread the kernel gives the signal to: libraries start threads when
    they are imported, before this process could block signals there. After the first, others are ignored: at its end
    the interpreter restores the deadly default of handled signals, but not of ignored ones.
    """

    def __init__(self) -> None:
        self._reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self._ignore_more)

    @staticmethod
    def _ignore_more(_number: int, _frame: object) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def wait(self, patience_s: float) -> bool:
        """Wait at most `patience_s` for a signal; return whether one came."""
        return bool(select.select([self._reader], [], [], patience_s)[0])


def duties(settings: ServiceSettings, leader: Leader, store: Store, *, stop: threading.Event) -> list[threading.Thread]:
    """Build the threads of all duties; `store` is the database without a check of the lead."""
    led = LeaderStore(store.url, leader)
    reconciler = Reconciler(
        led,
        sentinel_days=settings.sentinel_days,
        silent_s=silent_limit_s(settings),
        node_breaks=settings.node_breaks,
        lease_s=settings.lease_s,
    )
    sink = Sink(tracking_uri=settings.mlflow_url, experiment=settings.mlflow_experiment)
    projector = Projector(led, sink, check=leader.check, anyone=store)
    notifier = Notifier(
        store=led, hosts=settings.allowed_hosts, mailer=mailer_of(settings), links_base=settings.public_url
    )
    handlers = OutboxHandlers(led, webhook_of(settings), notifier)

    def judge() -> bool:
        done = [handlers.run_due(kind) for kind in (OutboxKind.LOOK, OutboxKind.JUDGE, OutboxKind.REPORT)]
        return any(done)  # one of each kind in turn: none waits until all of another are done

    works = {
        "reconciler": reconciler.tick,
        "wakes": WakeResender(led, settings.celery_url).run_due,
        "judge": judge,
        "webhooks": lambda: handlers.run_due(OutboxKind.HOOK),
        "notifications": lambda: handlers.run_due(OutboxKind.NOTIFY),
        "retention": retention(led, settings),
        "projector": projector.run_due,
    }
    return [duty(leader, name, work, stop=stop) for name, work in works.items()]


class Drop(Protocol):
    """Drops one piece that is due."""

    def __call__(self, connection: Connection, *, age_s: float) -> object:
        """Drop a piece that has been due for `age_s`; return something true if there was one."""


class Retention:
    """Drops what has been due for more than `age_s`; an age of 0 keeps all."""

    def __init__(self, store: Store, drop: Drop, *, age_s: float) -> None:
        self._store = store
        self._drop = drop
        self._age_s = age_s
        self._rests_until = 0.0

    def round(self) -> bool:
        """Drop one piece; return whether there may be more to drop."""
        if self._age_s <= 0 or time.monotonic() < self._rests_until:
            return False
        with self._store.write() as connection:
            dropped = bool(self._drop(connection, age_s=self._age_s))
        if not dropped:
            self._rests_until = time.monotonic() + REST_S
        return dropped


def retention(store: Store, settings: ServiceSettings) -> Callable[[], bool]:
    """Return the work that drops old logs and old code, a little of each in turn."""
    logs = Retention(store, drop_logs, age_s=settings.log_days * 86_400)
    code = Retention(store, drop_oldest, age_s=settings.code_days * 86_400)

    def round_of_both() -> bool:
        done = [logs.round(), code.round()]
        return any(done)

    return round_of_both


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
                "start the API or run `python -m ablate.service.store.migrate`"
            )
        if signals.wait(TICK_S):
            return False
        current = current_revision(store)
    return True


def main() -> int:
    """Run until a signal, or until the lead is lost; return 1 then, and when it cannot start."""
    signals = StopSignals()
    try:
        settings = get_settings()
        configure_logging(settings.log_format)
        store = Store(settings.sqlalchemy_url)
        if not wait_for_schema(store, signals):
            return 0
        leader, stop = Leader(store, lease_s=settings.projector_lease_s), threading.Event()
        running = duties(settings, leader, store, stop=stop)
    except (ConfigurationError, SQLAlchemyError) as error:
        log.error("cannot start: %s", error)
        return 1
    for thread in (leader.thread, *running):
        thread.start()
    log.info("running: %s", ", ".join(thread.name for thread in running))
    while not leader.is_lost and leader.hung is None and not signals.wait(TICK_S):
        with suppress(OSError):  # other checks report a full disk, and the health check an old file
            (settings.home / ALIVE).touch()
    stop.set()
    if leader.hung is not None:
        log.error("a round of duty %s lasts longer than %.0f s: this process ends", leader.hung, ROUND_S)
    deadline = time.monotonic() + (LAST_CALL_S if leader.is_lost else JOIN_S)
    for thread in running:
        thread.join(max(0.0, deadline - time.monotonic()))
    if leader.hung is not None:
        return 1  # without resigning: the duty may still write until the lease ends
    leader.resign()
    store.close()
    if leader.is_lost:
        log.error("another background process took over: this one ends, and may start again to stand by")
        return 1
    log.info("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
