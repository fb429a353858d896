"""Brings MLflow up to date with one ablation after the other.

MLflow cannot reject a late call, so a process that lost the lead asks for its ablation once more after its last call.
The new leader then writes the parent run again.
"""

from typing import Protocol

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from ablate.experiments.reporting.mlflow.runs import is_open
from ablate.experiments.reporting.mlflow.sink import Check, Projection
from ablate.experiments.reporting.view import AblationView
from ablate.service.background.outbox_handlers import Ending, OutboxTaker, nothing_to_store
from ablate.service.errors import LeaseLost
from ablate.service.lifecycle import PROJECTIONS, OutboxKind
from ablate.service.store import outbox
from ablate.service.store.ablations import results
from ablate.service.store.session import Store

SLICE_S = 60.0
"""A projection that took this long goes on later, behind the others."""


class ProjectionSink(Protocol):
    """The place that ablations are projected to."""

    def project(
        self, view: AblationView, report_html: str | None, *, slice_s: float, check: Check, was_tried: bool
    ) -> Projection:
        """Write `view`, with `check` before every call; `was_tried` means that the parent may be wrong."""


class Projector(OutboxTaker):
    """Projects the ablation that is due first."""

    def __init__(self, store: Store, sink: ProjectionSink, *, check: Check, anyone: Store) -> None:
        """Use `check` before every MLflow call, and `anyone` to ask for a projection without leading."""
        super().__init__(store)
        self._sink = sink
        self._check = check
        self._anyone = anyone
        self._writes: str | None = None

    def run_due(self) -> bool:
        """Project one ablation that is due; return whether there was one."""
        self._writes = None
        try:
            return self.take_due(PROJECTIONS, self._project)
        except LeaseLost:
            if self._writes is not None:
                self._ask_again(self._writes)
            raise

    @retry(retry=retry_if_exception_type(SQLAlchemyError), wait=wait_fixed(1), stop=stop_after_delay(20), reraise=True)
    def _ask_again(self, ablation_id: str) -> None:
        with self._anyone.write() as connection:
            outbox.add(connection, OutboxKind.PROJECT, ablation_id, tries=1)

    def _project(self, ablation_id: str, tries: int) -> Ending:
        """Write the current state; a finished ablation without a report waits for its report's own row."""
        with self.store.read() as connection:
            view = results.ablation_view(connection, ablation_id)
            html = None if is_open(view.state) else results.read_report(connection, ablation_id)
        if html is None and not is_open(view.state):
            return nothing_to_store
        self._writes = ablation_id
        shown = self._sink.project(view, html, slice_s=SLICE_S, check=self._check, was_tried=tries > 0)

        def ending(connection: Connection) -> None:
            place = {"experiment_id": shown.experiment_id, "run_id": shown.parent_run_id}
            results.store_projection(connection, ablation_id, **place, whole=html is not None)

        return ending
