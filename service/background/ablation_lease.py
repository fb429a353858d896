"""The lease under which a projector writes one ablation into MLflow, which knows no fencing tokens.

No call is begun in the second half of a lease that was not renewed, and an alarm ends a process that is stopped or
starved until its end, so that nothing is written under a lease that another projector may have. In the database what
follows is compare-and-set. Should the lease be lost all the same (the database's clock was set), the loser asks for the
ablation once more when it has stopped writing.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection

from service.background.lease_alarm import Alarm, now_s
from service.errors import LeaseLost
from service.store import leaders
from service.store.projections import lease_of
from service.store.session import Store

RENEWALS = 6
"""In one lease."""


class AblationLease:
    """Held for one ablation after the other; `renew` is called from another thread meanwhile."""

    def __init__(self, store: Store, holder: str, *, lease_s: float, alarm: Alarm) -> None:
        self._store = store
        self._holder = holder
        self._lease_s = lease_s
        self._alarm = alarm
        self._lock = threading.Lock()
        self._ablation: str | None = None
        self._until = 0.0
        self._is_writing = False

    def take(self, ablation_id: str) -> bool:
        """Take the lease on an ablation; return False while another projector has it."""
        began = now_s()
        if not leaders.hold_duty(self._store, lease_of(ablation_id), self._holder, lease_s=self._lease_s):
            return False
        with self._lock:  # counted from before the database was asked, so as never to outlive its count
            self._ablation, self._until = ablation_id, began + self._lease_s
        return True

    def renew(self) -> None:
        """Renew the lease when its time has come; one that another projector took is lost."""
        ablation_id, began = self._ablation, now_s()
        if ablation_id is None or self._until - began > self._lease_s * (1 - 1 / RENEWALS):
            return
        with self._store.write() as connection:
            mine = leaders.renew_duty(connection, lease_of(ablation_id), self._holder, lease_s=self._lease_s)
        with self._lock:
            if self._ablation == ablation_id:
                self._until = began + self._lease_s if mine else 0.0
                if mine and self._is_writing:
                    self._alarm.set(self._until)

    def check(self) -> None:
        """Raise LeaseLost unless half of the lease is left: enough for one call."""
        if self._until - now_s() < self._lease_s / 2:
            raise LeaseLost(f"the lease on writing {self._ablation} into MLflow was not renewed in time")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Let MLflow be called: this process ends if it cannot say in time that it stopped."""
        with self._lock:
            self.check()
            self._is_writing = True
            self._alarm.set(self._until)
        try:
            yield
        finally:
            with self._lock:
                self._is_writing = False
                self._alarm.clear()

    def stop_renewing(self) -> None:
        """Leave the lease to its end, or to `give_up`."""
        with self._lock:
            self._ablation = None

    def give_up(self, connection: Connection, ablation_id: str) -> None:
        """End the lease in a transaction of its holder. Raises LeaseLost when another projector has it."""
        if not leaders.end_duty(connection, lease_of(ablation_id), self._holder):
            raise LeaseLost(f"another projector took {ablation_id} over")
