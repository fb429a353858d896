"""What the service drops when it is old: one piece for each call, so that others do not wait."""

import time
from typing import Protocol

from sqlalchemy import Connection

from ablate.service.store.session import Store

REST_S = 600.0
"""Pause after a round that found nothing to drop."""


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
