"""What heals by itself: expired leases, lost wake-ups, cancellations that nobody finishes, keys nobody needs."""

import logging
import time

from kombu.exceptions import OperationalError

from experiments.runtime.wake import celery_app, publish_wake
from service import sentinels
from service.lifecycle import OutboxKind
from service.store import attempts, claims, completion, outbox, submissions
from service.store.session import Store

log = logging.getLogger(__name__)

WAKE_EVERY_S = 3.0
STALE_WAKE_S = 10.0
CLEAN_EVERY_S = 600.0
KEY_AGE_S = 48 * 3600.0


HOOK_AGE_S = 86_400.0
"""A webhook that nobody took for so long is given up."""


class Reconciler:
    """Compares what is with what should be, a little at every tick."""

    def __init__(self, store: Store, broker_url: str, *, sentinel_days: float = 0.0, silent_s: float = 30.0) -> None:
        self._store = store
        self._celery = celery_app(broker_url, name="ablate-reconciler")
        self._woken_at = 0.0
        self._cleaned_at = float("-inf")
        self._watched_at = float("-inf")
        self._sentinel_s = sentinel_days * 86_400
        self._silent_s = silent_s

    def tick(self) -> None:
        """Do what is due."""
        self.expire_leases()
        with self._store.write() as connection:
            completion.complete_cancelling(connection)
        now = time.monotonic()
        if now - self._woken_at >= WAKE_EVERY_S:
            self._woken_at = now
            self.resend_wakes()
        if now - self._cleaned_at >= CLEAN_EVERY_S:
            self._cleaned_at = now
            with self._store.write() as connection:
                submissions.forget_idempotency(connection, age_s=KEY_AGE_S)
                given_up = outbox.drop_older(connection, OutboxKind.HOOK, age_s=HOOK_AGE_S)
            if given_up:
                log.warning("%d webhooks were given up: nobody took them for a day", given_up)
        if self._sentinel_s and now - self._watched_at >= min(CLEAN_EVERY_S, self._sentinel_s / 10):
            self._watched_at = now
            sentinels.submit_due(self._store, every_s=self._sentinel_s, silent_s=self._silent_s)

    def expire_leases(self) -> int:
        """Requeue every block whose worker fell silent, each in its own transaction; return how many."""
        count = 0
        while True:
            with self._store.write() as connection:
                block_id = attempts.expire_lease(connection)
            if block_id is None:
                return count
            log.warning("block %s went back to the queue: its lease ran out", block_id)
            count += 1

    def resend_wakes(self) -> None:
        """Wake the workers of every node class for which a block waits; drop wake-ups that a dead API left behind."""
        with self._store.read() as connection:
            node_classes = claims.waiting_node_classes(connection)
        try:
            for node_class in node_classes:
                publish_wake(self._celery, node_class)
        except OperationalError as error:
            log.warning("wake-ups not sent: %s", error)
            return
        with self._store.write() as connection:
            outbox.drop_older(connection, OutboxKind.WAKE, age_s=STALE_WAKE_S)
