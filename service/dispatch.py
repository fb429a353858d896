"""Sending wake-ups after the commit. A thread does it, so a broker that is away slows no request.

A lost wake-up costs latency and no work: workers poll, and the reconciler sends again.
"""

import logging
import threading

from kombu.exceptions import OperationalError
from sqlalchemy.exc import DBAPIError

from experiments.runtime.wake import celery_app, publish_wake
from service.lifecycle import OutboxKind
from service.store import outbox
from service.store.session import Store

log = logging.getLogger(__name__)

BATCH = 500
IDLE_S = 5.0
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 5.0
PAUSE_S = 0.1
"""Between two rounds: a lone submission is told at once, a burst is told together."""


class WakePublisher:
    """Publishes due wake-ups from the outbox as soon as `notify` tells that there are some."""

    def __init__(self, store: Store, broker_url: str) -> None:
        self._store = store
        self._celery = celery_app(broker_url, name="ablate-service")
        self._notified = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wake-publisher", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, *, timeout_s: float = 5.0) -> None:
        """Stop the thread after what it is doing."""
        self._stopped.set()
        self._notified.set()
        self._thread.join(timeout_s)
        self._celery.close()

    def notify(self) -> None:
        """Tell that a transaction with a wake-up was committed. Never blocks."""
        self._notified.set()

    def _run(self) -> None:
        backoff_s = 0.0
        while not self._stopped.is_set():
            self._notified.wait(IDLE_S)
            self._notified.clear()
            try:
                self.send_due()
                backoff_s = 0.0
                self._stopped.wait(PAUSE_S)
            except (OperationalError, DBAPIError) as error:
                backoff_s = min(MAX_BACKOFF_S, max(FIRST_BACKOFF_S, 2 * backoff_s))
                log.warning("wake-ups not sent, trying again in %.1f s: %s", backoff_s, error)
                self._stopped.wait(backoff_s)

    def send_due(self) -> None:
        """Publish one wake-up per node class that has any due, then forget them."""
        with self._store.read() as connection:
            rows = outbox.due(connection, OutboxKind.WAKE, limit=BATCH)
        for node_class in sorted({row.key for row in rows}):
            publish_wake(self._celery, node_class)
        if rows:
            with self._store.write() as connection:
                outbox.done(connection, [row.id for row in rows])
