"""Duties of the background process: loops that one process at a time runs, by leases that a thread of its own renews.

A round may take minutes (a large ablation into a slow MLflow), so the lease does not wait for its end.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from sqlalchemy.exc import SQLAlchemyError

from experiments.ids import new_id
from service.store import leaders
from service.store.session import Store

log = logging.getLogger(__name__)

TICK_S = 0.5
DUTY_LEASE_S = 15.0
RENEW_EVERY_S = 5.0
TRY_EVERY_S = 1.0
"""Who waits for a duty asks so often whether it is free."""


class Duty:
    """A loop that one process at a time runs; a failing round is logged and the next one tries again.

    With a `holder` every process has a duty of its own under this name, and runs it beside the others.
    """

    def __init__(
        self, store: Store, name: str, work: Callable[[], bool], *, stop: threading.Event, holder: str | None = None
    ) -> None:
        self._store = store
        self._name = name if holder is None else leaders.duty_of_its_own(name, holder)
        self._work = work
        self._stop = stop
        self._holder = holder or new_id("duty")
        self._held_until = 0.0
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def renew(self) -> None:
        """Renew the lease, or take it when it is free; waits for nothing but the database."""
        began = time.monotonic()
        if self._held_until - began > DUTY_LEASE_S - RENEW_EVERY_S:
            return
        mine = leaders.hold_duty(self._store, self._name, self._holder, lease_s=DUTY_LEASE_S)
        self._held_until = began + DUTY_LEASE_S if mine else 0.0

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                busy = time.monotonic() < self._held_until and self._work()
            except Exception:  # the boundary of a background loop: recorded, and the loop goes on
                log.exception("a round of %s failed", self._name)
                busy = False
            if not busy:
                self._stop.wait(TICK_S)
        self._drop()

    def _drop(self) -> None:
        try:
            with self._store.write() as connection:
                leaders.drop_duty(connection, self._name, self._holder)
        except SQLAlchemyError as error:
            log.warning("duty %s not handed over: %s", self._name, error)


class Keeper:
    """The thread that keeps what this process holds: its duties, and what they have in hand."""

    def __init__(self, renewals: Sequence[Callable[[], None]], *, stop: threading.Event) -> None:
        self._renewals = renewals
        self._stop = stop
        self.thread = threading.Thread(target=self._run, name="keeper", daemon=True)

    def _run(self) -> None:
        while not self._stop.is_set():
            for renew in self._renewals:
                try:
                    renew()
                except Exception:  # a lease that is not renewed ends by itself
                    log.exception("a lease was not renewed")
            self._stop.wait(TRY_EVERY_S)
