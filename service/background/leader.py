"""The leader: of several background processes one does all duties, and the others stand by.

A thread renews the leader's row in the database, unless a duty hangs. A stand-by takes over when the row was not
renewed for a lease. A process that lost the lead, or has a duty that hangs, ends. So it never leads again with work
from before.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from ablate.experiments.ids import new_id
from ablate.service.errors import LeaseLost
from ablate.service.store import leaders
from ablate.service.store.session import Store

log = logging.getLogger(__name__)

TICK_S = 0.5
"""Pause of a duty that has nothing to do."""
ROUND_S = 1800.0
"""Longest round of a duty. The longest honest ones take minutes: judging 128,000 trials, a projection of a minute."""
_RENEWALS = 5
"""In one lease; a stand-by looks for a free lease as often."""


def now_s() -> float:
    """Return seconds of a clock that nobody sets and that runs on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Leader:
    """This process's part in the choice of a leader."""

    def __init__(self, store: Store, *, lease_s: float) -> None:
        self.is_lost = False
        """Whether this process led and another one took over."""
        self.hung: str | None = None
        """The duty whose round lasts too long, which ends the lead."""
        self._rounds: dict[str, float] = {}
        """When the running round of each duty began."""
        self._holder = f"{socket.gethostname()[:30]}:{os.getpid()}:{new_id('x')[-10:]}"
        self._store = store
        self._lease_s = lease_s
        self._has_led = False
        self._until = 0.0
        self._ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="leader", daemon=True)

    @property
    def leads(self) -> bool:
        """Whether this process leads, by its own clock."""
        return now_s() < self._until

    def check(self) -> None:
        """Raise LeaseLost unless this process leads, by its own clock."""
        if not self.leads:
            raise LeaseLost

    def confirm(self, connection: Connection) -> None:
        """Raise LeaseLost if another process has taken over, by the database."""
        if not leaders.leads(connection, self._holder):
            raise LeaseLost

    def renew(self) -> None:
        """Renew the lease, or try to take it if this process never led."""
        began = now_s()
        if not self._has_led:
            self._has_led = leads = leaders.take_lease(self._store, self._holder, lease_s=self._lease_s)
        else:
            with self._store.write() as connection:
                leads = leaders.renew_lease(connection, self._holder, lease_s=self._lease_s)
            self.is_lost = not leads
        if leads and not self._until:
            log.info("this process leads as %s", self._holder)
        self._until = began + self._lease_s if leads else 0.0

    @contextmanager
    def round_of(self, duty: str) -> Iterator[None]:
        """Record that a round of `duty` runs."""
        self._rounds[duty] = time.monotonic()
        try:
            yield
        finally:
            del self._rounds[duty]

    def _find_hung(self) -> str | None:
        latest = time.monotonic() - ROUND_S
        return next((duty for duty, began in self._rounds.copy().items() if began < latest), None)

    def _run(self) -> None:
        while not self.is_lost and not self._ended.is_set():
            self.hung = self._find_hung()
            if self.hung is not None:  # the lease ends by itself, as that of a process that has died
                return
            try:
                self.renew()
            except Exception:  # a lease that is not renewed ends by itself
                log.exception("the lease was not renewed")
            self._ended.wait(self._lease_s / _RENEWALS)

    def resign(self) -> None:
        """End the thread, and let another process lead at once."""
        self._ended.set()
        if self.thread.is_alive():
            self.thread.join()
        try:
            with self._store.write() as connection:
                leaders.resign(connection, self._holder)
        except SQLAlchemyError as error:
            log.warning("the lease was not given back and has to run out: %s", error)


class LeaderStore(Store):
    """The database for duties: each transaction first confirms in the database that this process still leads."""

    def __init__(self, url: str, leader: Leader) -> None:
        super().__init__(url)
        self._leader = leader

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open a transaction. Raises LeaseLost if another process has taken over."""
        with super().write() as connection:
            self._leader.confirm(connection)
            yield connection


def duty(leader: Leader, name: str, work: Callable[[], bool], *, stop: threading.Event) -> threading.Thread:
    """Return a thread that repeats `work` while this process leads, with a pause when `work` had nothing to do."""

    def run() -> None:
        while not stop.is_set():
            try:
                with leader.round_of(name):
                    busy = leader.leads and work()
            except LeaseLost:
                log.warning("a round of %s was given up: this process does not lead any more", name)
                busy = False
            except Exception:  # the boundary of a background loop: recorded, and the loop goes on
                log.exception("a round of %s failed", name)
                busy = False
            if not busy:
                stop.wait(TICK_S)

    return threading.Thread(target=run, name=name, daemon=True)
