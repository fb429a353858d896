"""All that is known after a run, as plain rows: database, MLflow's own database, receipts on the nodes, trainers.

Nothing here asks the service or its code.
"""

import json
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.trainers import Span

Row = dict[str, Any]


@dataclass
class Run:
    """One MLflow run."""

    id: str
    status: str
    tags: dict[str, str]
    metrics: dict[str, float]
    """Last value by name."""
    receipt: str | None
    """The artefact receipt.json."""


@dataclass
class Books:
    """What the checker reads."""

    tables: dict[str, list[Row]]
    """Rows of the database by table."""
    runs: list[Run] = field(default_factory=list)
    """Runs of MLflow that are not deleted."""
    on_nodes: dict[str, Row] = field(default_factory=dict)
    """Receipts on the disks of the nodes, by "attempt/trial"."""
    spans: list[Span] = field(default_factory=list)
    accepted: dict[str, str] = field(default_factory=dict)
    """Every submission that was answered 2xx: Idempotency-Key and the id that was given."""
    cancelled: set[str] = field(default_factory=set)
    """Ablations that somebody asked to cancel."""
    clock_was_set: bool = False
    """Whether the database's clock jumped: then times in rows do not order anything."""

    def of(self, table: str, **values: Any) -> list[Row]:
        """Return the rows of a table with these values."""
        return [row for row in self.tables[table] if all(row[name] == value for name, value in values.items())]


def read_runs(folder: Path) -> list[Run]:
    """Read MLflow's database and artefacts as files, without its server."""
    database = sqlite3.connect(f"file:{folder / 'mlflow.db'}?mode=ro", uri=True, timeout=30)
    database.row_factory = sqlite3.Row
    tags = _by_run(database, "SELECT run_uuid, key, value FROM tags")
    metrics = _by_run(database, "SELECT run_uuid, key, value FROM latest_metrics")
    runs = database.execute("SELECT run_uuid, status, artifact_uri FROM runs WHERE lifecycle_stage = 'active'")
    found = [
        Run(run["run_uuid"], run["status"], tags.get(run["run_uuid"], {}), metrics.get(run["run_uuid"], {}), None)
        for run in runs
    ]
    database.close()
    for run in found:
        (path,) = [*folder.glob(f"artifacts/*/{run.id}/artifacts/receipt.json"), None][:1]
        run.receipt = None if path is None else path.read_text()
    return found


def _by_run(database: sqlite3.Connection, query: str) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for run, key, value in database.execute(query):
        found.setdefault(run, {})[key] = value
    return found


def read_nodes(home: Path) -> dict[str, Row]:
    """Read every receipt that lies on a node's disk whole."""
    found = {}
    for path in home.glob("*/work/*/*/receipt.json"):
        try:
            found[f"{path.parent.parent.name}/{path.parent.name}"] = json.loads(path.read_text())
        except (OSError, ValueError):  # a full disk, or a node that cleans up at this moment
            continue
    return found
