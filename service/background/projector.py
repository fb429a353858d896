"""Brings MLflow up to date with one ablation after the other, beside any number of other projectors."""

import logging
import os
import socket
from collections.abc import Callable
from typing import Protocol

from sqlalchemy import Connection

from experiments.errors import ProjectionUnfinished
from experiments.ids import new_id
from experiments.reporting.mlflow.runs import is_open
from experiments.reporting.mlflow.sink import Check, Projection
from experiments.reporting.view import AblationView
from service.background.ablation_lease import AblationLease
from service.background.lease_alarm import Alarm
from service.background.outbox_handlers import LAST_FIRST_EVERY, retry_delay_s
from service.errors import LeaseLost
from service.store import outbox, projections
from service.store.ablations import results
from service.store.session import Store

log = logging.getLogger(__name__)

SLICE_S = 60.0
"""A projection goes on later when it took this long: others are waiting."""

Ending = Callable[[Connection], None]
"""What becomes of the rows that asked for a projection, in the transaction that ends its lease."""


class ProjectionSink(Protocol):
    """Where ablations are written."""

    def project(
        self, view: AblationView, report_html: str | None, *, slice_s: float, check: Check, was_tried: bool
    ) -> Projection:
        """Bring it to the state of `view`, with `check` before every call; distrust what is there if it `was_tried`."""


def holder_name() -> str:
    """Return a name that says which process this is, and that no other one ever has."""
    return f"{socket.gethostname()[:30]}:{os.getpid()}:{new_id('x')[-10:]}"


class Projector:
    """Takes the ablation that is due first and in no other projector's hands, and writes it."""

    def __init__(self, store: Store, sink: ProjectionSink, *, lease_s: float, alarm: Alarm) -> None:
        self.holder = holder_name()
        self._store = store
        self._sink = sink
        self._lease = AblationLease(store, self.holder, lease_s=lease_s, alarm=alarm)
        self.renew = self._lease.renew
        self._takes = 0

    def run_due(self) -> bool:
        """Write one ablation that is due; return whether there was one."""
        self._takes += 1
        last_first = self._takes % LAST_FIRST_EVERY == 0
        with self._store.read() as connection:
            ablation_id = projections.next_due(connection, self.holder, last_first=last_first)
        if ablation_id is None:
            return False
        if self._lease.take(ablation_id):
            try:
                self._answer(ablation_id)
            finally:
                self._lease.stop_renewing()
        return True

    def _answer(self, ablation_id: str) -> None:
        with self._store.write() as connection:
            rows = projections.begin(connection, ablation_id)
        ending = self._bring_up_to_date(ablation_id, rows) if rows else _nothing
        try:
            with self._store.write() as connection:
                self._lease.give_up(connection, ablation_id)
                ending(connection)
        except LeaseLost as lost:
            log.warning("%s is projected once more, after this projector's last call: %s", ablation_id, lost)
            self._ask_again(ablation_id, rows)

    def _ask_again(self, ablation_id: str, rows: list[outbox.OutboxRow]) -> None:
        with self._store.write() as connection:
            for kind in {row.kind for row in rows}:
                outbox.add(connection, kind, ablation_id, tries=1)

    def _bring_up_to_date(self, ablation_id: str, rows: list[outbox.OutboxRow]) -> Ending:
        """Write what the rows ask for; return what becomes of them."""
        ids, tries = [row.id for row in rows], max(row.tries for row in rows)
        try:
            ending = self._show(ablation_id, ids, was_tried=tries > 0)
        except (ProjectionUnfinished, LeaseLost) as unfinished:
            log.info("%s goes on in MLflow later: %s", ablation_id, unfinished)
            return lambda connection: outbox.put_back(connection, ids)
        except Exception as error:  # the boundary of a projection: recorded in its rows, tried again later
            said, delay_s = f"{type(error).__name__}: {error}", retry_delay_s(tries)
            log.warning("%s is not in MLflow, trying again in %.0f s: %s", ablation_id, delay_s, error)
            return lambda connection: outbox.retry(connection, ids, delay_s=delay_s, error=said)
        log.info("%s is in MLflow", ablation_id)
        return ending

    def _show(self, ablation_id: str, ids: list[int], *, was_tried: bool) -> Ending:
        """Write what there is to show now; what is over and has no report yet is asked for by its report."""
        with self._store.read() as connection:
            view = results.ablation_view(connection, ablation_id)
            html = None if is_open(view.state) else results.read_report(connection, ablation_id)
        if html is None and not is_open(view.state):
            return lambda connection: outbox.done(connection, ids)
        with self._lease.writing():
            shown = self._sink.project(view, html, slice_s=SLICE_S, check=self._lease.check, was_tried=was_tried)

        def ending(connection: Connection) -> None:
            place = {"experiment_id": shown.experiment_id, "run_id": shown.parent_run_id}
            results.store_projection(connection, ablation_id, **place, whole=html is not None)
            outbox.done(connection, ids)

        return ending


def _nothing(_connection: Connection) -> None:
    """Somebody else has just answered every row."""
