"""Books of a service in this process: its tables, and the runs that it would have written into MLflow."""

import json
from typing import Any

from sqlalchemy import text

from ablate.experiments.reporting.mlflow.parent import parent
from ablate.experiments.reporting.mlflow.runs import children
from ablate.experiments.reporting.mlflow.sink import Check, Projection
from ablate.experiments.reporting.view import AblationView
from ablate.service.background.outbox_handlers import OutboxHandlers
from ablate.service.lifecycle import OutboxKind
from ablate.service.store.session import Store
from tests.chaos.books import Books, Run
from tests.chaos.databases import TABLES
from tests.projectors import projector


class Ledger:
    """Keeps projections as runs, in place of MLflow; the last one of an ablation counts."""

    def __init__(self) -> None:
        self.runs: dict[str, list[Run]] = {}

    def project(
        self, view: AblationView, report_html: str | None, *, slice_s: float, check: Check, was_tried: bool
    ) -> Projection:
        """Keep the whole projection at once, however short `slice_s` is."""
        check()
        contents = [parent(view, report_html), *children(view)]
        runs = []
        for number, content in enumerate(contents):
            own = {"ablation.id": view.ablation_id, "ablation.run": content.identity, "ablation.projected": "1"}
            metrics = {point.key: point.value for point in content.points}
            name, receipt = f"{view.ablation_id}-{number}", content.texts.get("receipt.json")
            runs.append(Run(name, content.status, {**content.tags, **own}, metrics, receipt))
        self.runs[view.ablation_id] = runs
        return Projection(parent_run_id=runs[0].id, experiment_id="1")


def settle(store: Store, ledger: Ledger) -> None:
    """Do all work of the outbox."""
    handlers, mlflow = OutboxHandlers(store), projector(store, ledger)
    kinds = (OutboxKind.LOOK, OutboxKind.JUDGE, OutboxKind.REPORT)
    while any(handlers.run_due(kind) for kind in kinds) or mlflow.run_due():
        pass
    with store.write() as connection:
        connection.execute(text("DELETE FROM outbox WHERE kind = 'wake'"))


def books_of(store: Store, ledger: Ledger) -> Books:
    """Return the books."""
    with store.read() as connection:
        tables: dict[str, list[dict[str, Any]]] = {
            name: [dict(row._mapping) for row in connection.execute(text(f'SELECT * FROM "{name}"'))]  # noqa: S608
            for name in TABLES
        }
    on_nodes = {f"{r['attempt_id']}/{r['trial_id']}": json.loads(r["payload"]) for r in tables["receipts"]}
    return Books(tables=tables, runs=[run for runs in ledger.runs.values() for run in runs], on_nodes=on_nodes)
