"""Repairs: expired leases, unfinished cancellations, old keys, nodes to quarantine, sentinels to submit.

It uses the database alone, so neither the broker nor MLflow can delay the end of a lease.
"""

import logging
import math
import time

from sqlalchemy import select

from ablate.service.background import sentinels
from ablate.service.background.leader import now_s
from ablate.service.lifecycle import OutboxKind
from ablate.service.store import outbox
from ablate.service.store.ablations import submissions
from ablate.service.store.blocks import attempts, completion
from ablate.service.store.nodes import node_states, nodes
from ablate.service.store.session import Store
from ablate.service.store.tables import db_now

log = logging.getLogger(__name__)

STALE_WAKE_S = 10.0
CLEAN_EVERY_S = 600.0
KEY_AGE_S = 48 * 3600.0

HOOK_AGE_S = 86_400.0
"""A webhook that its receiver did not accept for so long is given up."""

STEP_S = 2.0
"""A database's clock that moved so much more or less than this process's was set."""


class ClockWatch:
    """Notices that somebody set the database's clock."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ahead: tuple[float, float] | None = None
        """Bounds on how far the database's clock is ahead of this process's."""

    def was_set(self) -> bool:
        """Return whether the clock was set since the last call."""
        began = now_s()
        with self._store.read() as connection:
            now = connection.execute(select(db_now())).scalar_one()
        (least, most), self._ahead = self._ahead or (-math.inf, math.inf), (now - now_s(), now - began)
        return self._ahead[0] > most + STEP_S or self._ahead[1] < least - STEP_S


class Reconciler:
    """Does what is due at every tick."""

    def __init__(
        self,
        store: Store,
        *,
        sentinel_days: float = 0.0,
        silent_s: float = 30.0,
        node_breaks: int = 0,
        lease_s: float = math.inf,
    ) -> None:
        self._store = store
        self._cleaned_at = float("-inf")
        self._watched_at = float("-inf")
        self._sentinel_s = sentinel_days * 86_400
        self._silent_s = silent_s
        self._node_breaks = node_breaks
        self._lease_s = lease_s
        self._clock = ClockWatch(store)
        self._expires_from = float("-inf")
        """Own time before which no lease expires."""

    def tick(self) -> bool:
        """Do what is due; return False, for the pause until the next tick."""
        if self._clock.was_set():
            log.warning("the database's clock was set: no lease expires for %g s, so that workers renew", self._lease_s)
            self._expires_from = now_s() + self._lease_s
        if now_s() >= self._expires_from:
            self.expire_leases()
        with self._store.write() as connection:
            completion.complete_cancelling(connection)
            outbox.drop_older(connection, OutboxKind.WAKE, age_s=STALE_WAKE_S)
        now = time.monotonic()
        if now - self._cleaned_at >= CLEAN_EVERY_S:
            self._cleaned_at = now
            self._clean()
        if self._sentinel_s and now - self._watched_at >= min(CLEAN_EVERY_S, self._sentinel_s / 10):
            self._watched_at = now
            sentinels.submit_due(self._store, every_s=self._sentinel_s, silent_s=self._silent_s)
        return False

    def _clean(self) -> None:
        with self._store.write() as connection:
            submissions.forget_idempotency(connection, age_s=KEY_AGE_S)
            gone = nodes.remove_gone(connection)
            given_up = sum(
                outbox.drop_older(connection, kind, age_s=HOOK_AGE_S) for kind in (OutboxKind.HOOK, OutboxKind.NOTIFY)
            )
        for name in gone:
            log.info("node %s has left: it is silent, and the time of its allocation is over", name)
        if given_up:
            log.warning("%d webhooks and notices were given up: their receivers accepted none for a day", given_up)

    def expire_leases(self) -> int:
        """Requeue each block whose lease ran out, in a transaction of its own; return how many."""
        count = 0
        while True:
            with self._store.write() as connection:
                expired = attempts.expire_lease(connection, lease_s=self._lease_s)
            if expired is None:
                return count
            block_id, node_id = expired
            log.warning("block %s went back to the queue: its lease ran out on node %s", block_id, node_id)
            self._judge_node(node_id)
            count += 1

    def _judge_node(self, node_id: str) -> None:
        with self._store.write() as connection:
            reason = node_states.judge_node(connection, node_id, limit=self._node_breaks)
        if reason is not None:
            log.error("node %s is quarantined: %s", node_id, reason)
