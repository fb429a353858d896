"""Wake-ups for workers, sent after the commit by threads that no request waits for.

A lost wake-up only costs time: workers poll, and the background process sends wake-ups again for waiting blocks.
"""

import logging
import threading
import time

from kombu.exceptions import OperationalError

from ablate.experiments.system.wake import celery_app, publish_wake
from ablate.service.lifecycle import OutboxKind
from ablate.service.store import outbox
from ablate.service.store.blocks import claims
from ablate.service.store.session import Store

log = logging.getLogger(__name__)

BATCH = 500
IDLE_S = 5.0
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 5.0
PAUSE_S = 0.25
"""Between two rounds, so that a burst of submissions sends one wake-up."""
ANSWER_S = 2.0
"""A broker that does not answer for so long counts as away."""
RESEND_EVERY_S = 3.0


class WakePublisher:
    """Publishes wake-ups from the outbox after every `notify`."""

    def __init__(self, store: Store, broker_url: str) -> None:
        self._store = store
        self._celery = celery_app(broker_url, name="ablate-service", answer_s=ANSWER_S)
        self._notified = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wake-publisher", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, *, timeout_s: float = 1.0) -> None:
        """Stop the thread after its current round; one that waits for a broker ends with the process."""
        self._stopped.set()
        self._notified.set()
        self._thread.join(timeout_s)

    def notify(self) -> None:
        """Send soon, because a transaction with a wake-up was committed. Never blocks."""
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
            except Exception as error:  # the thread's boundary: no library error ends it
                backoff_s = min(MAX_BACKOFF_S, max(FIRST_BACKOFF_S, 2 * backoff_s))
                log.warning("wake-ups not sent, trying again in %.1f s: %s", backoff_s, error)
                self._stopped.wait(backoff_s)
        self._celery.close()

    def send_due(self) -> None:
        """Publish one wake-up for each node class with due rows, then delete the rows."""
        with self._store.read() as connection:
            rows = outbox.due(connection, OutboxKind.WAKE, limit=BATCH)
        for node_class in sorted({row.key for row in rows}):
            publish_wake(self._celery, node_class)
        if rows:
            with self._store.write() as connection:
                outbox.done(connection, [row.id for row in rows])


class WakeResender:
    """Wakes the workers of node classes with waiting blocks repeatedly, because a wake-up may get lost."""

    def __init__(self, store: Store, broker_url: str) -> None:
        self._store = store
        self._celery = celery_app(broker_url, name="ablate-resender", answer_s=ANSWER_S)
        self._sent_at = float("-inf")
        self._was_away = False

    def run_due(self) -> bool:
        """Send what is due; return False, for a pause. Log once when the broker goes or returns."""
        if time.monotonic() - self._sent_at < RESEND_EVERY_S:
            return False
        self._sent_at = time.monotonic()
        with self._store.read() as connection:
            node_classes = claims.waiting_node_classes(connection)
        try:
            for node_class in node_classes:
                publish_wake(self._celery, node_class)
        except OperationalError as error:
            if not self._was_away:
                log.warning("wake-ups not sent, workers poll meanwhile: %s", error)
            self._was_away = True
            return False
        if self._was_away and node_classes:
            log.info("the broker accepts wake-ups again")
            self._was_away = False
        return False
