"""Projectors as threads that a test moves one step at a time: a step ends before every transaction and MLflow call."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, select, update

from experiments.reporting.mlflow.sink import Check, Projection, Sink
from experiments.reporting.view import AblationView
from service.background.projector import Projector
from service.store.columns import db_now
from service.store.session import Store
from service.store.tables import leaders

RANKS = {"queued": 0, "running": 1, "cancelled": 2}
LEASE_S = 30.0
HERE = threading.local()
"""The MLflow client of a projector's thread."""


class Killed(BaseException):
    """The process of a projector is gone."""


class World:
    """What all projectors share: who is inside MLflow with which ablation, how far each was shown, and a clock."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.now = 0.0
        self.inside: dict[str, list[Steps]] = {}
        self.shown: dict[str, int] = {}
        self.stolen: set[str] = set()
        """Ablations whose lease ended early, because somebody set the database's clock."""
        self.problems: list[str] = []
        self.together = 0
        """The most projectors that were inside MLflow at the same time."""

    def leases(self, holder: str) -> list[str]:
        """Return the ablations that a projector has by the database."""
        with self.store.read() as connection:
            mine = select(leaders.c.duty).where(leaders.c.holder == holder, leaders.c.until > db_now())
            return [name.removeprefix("p:") for name in connection.execute(mine).scalars()]

    def end_leases(self, holder: str) -> None:
        """Let the leases of a projector run out, by the database's clock."""
        with self.store.write() as connection:
            connection.execute(update(leaders).where(leaders.c.holder == holder).values(until=db_now() - 1))


class Steps:
    """One projector in a thread of its own, its store, its MLflow client and its alarm."""

    def __init__(self, world: World, client: Any) -> None:
        self.world, self.client = world, client
        self.is_armed = self.is_frozen = self.is_killed = self.fails_next = False
        self._turn, self._parked = threading.Semaphore(0), threading.Semaphore(0)
        self.projector = Projector(self, self, lease_s=LEASE_S, alarm=self)  # type: ignore[arg-type]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._parked.acquire()

    def step(self) -> None:
        """Let it go on to the place before its next transaction or call."""
        if self._thread.is_alive():
            self._turn.release()
            assert self._parked.acquire(timeout=60)

    def kill(self) -> None:
        """End it where it stands, as SIGKILL does."""
        self.is_killed = True
        self.step()
        self._thread.join()

    def _run(self) -> None:
        HERE.client = self.client
        while not self.is_killed:
            try:
                self.pause()
                self.projector.run_due()
            except Killed:
                self._parked.release()
            except Exception as error:
                self.world.problems.append(f"{type(error).__name__}: {error}")

    def pause(self) -> None:
        """Stop here until the next step; a dead one goes nowhere."""
        if not self.is_killed:
            self._parked.release()
            self._turn.acquire()
        if self.is_killed:
            raise Killed

    def before_call(self) -> None:
        """Stop before a call to MLflow; it may fail."""
        self.pause()
        if self.fails_next:
            self.fails_next = False
            raise OSError("MLflow is away")

    @contextmanager
    def read(self) -> Iterator[Connection]:
        self.pause()
        with self.world.store.read() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        self.pause()
        with self.world.store.write() as connection:
            yield connection

    def set(self, until_s: float) -> None:
        self.is_armed = until_s > self.world.now

    def clear(self) -> None:
        self.is_armed = False

    def project(
        self, view: AblationView, report_html: str | None, *, slice_s: float, check: Check, was_tried: bool
    ) -> Projection:
        """Write with the real sink, and note that nobody else does, and that nobody goes back in time."""
        name, rank = view.ablation_id, RANKS[view.state]
        inside = self.world.inside.setdefault(name, [])
        others = [one for one in inside if not one.is_frozen]
        if name not in self.world.stolen and (others or rank < self.world.shown.get(name, 0)):
            self.world.problems.append(f"{name}: {len(others)} write it already; state {rank} comes late")
        inside.append(self)
        self.world.shown[name] = max(rank, self.world.shown.get(name, 0))
        self.world.together = max(self.world.together, sum(map(len, self.world.inside.values())))
        try:
            return Sink("memory").project(view, report_html, slice_s=slice_s, check=check, was_tried=was_tried)
        finally:
            inside.remove(self)
