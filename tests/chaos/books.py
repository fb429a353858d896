"""The books of a run as plain rows: database, MLflow's database, receipts on nodes, trainers.

Independent of the service's code.
"""

import json
import math
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
    """Last values by name."""
    receipt: str | None
    """Text of the artefact receipt.json."""


@dataclass(frozen=True)
class Call:
    """A call of a client."""

    verb: str
    """claim, heartbeat or report of a worker; cancel or priority of people."""
    subject: str
    """Id of the attempt, or of the ablation."""
    status: int
    """Status of the service's answer; 0 without an answer."""
    sent: Row
    answer: Row
    """The answer, if its status is 200."""


@dataclass
class Books:
    """The input of the checker."""

    tables: dict[str, list[Row]]
    """Rows of the database by table."""
    runs: list[Run] = field(default_factory=list)
    """MLflow's runs, without deleted ones."""
    on_nodes: dict[str, Row] = field(default_factory=dict)
    """Receipts on the disks of the nodes, by "attempt/trial"."""
    spans: list[Span] = field(default_factory=list)
    accepted: dict[str, str] = field(default_factory=dict)
    """The ablation ids of accepted submissions, by Idempotency-Key."""
    cancelled: set[str] = field(default_factory=set)
    """Ablations for which a user asked to cancel."""
    calls: list[Call] | None = None
    """Calls of workers and people; None if nobody recorded them."""
    lasted_s: float = math.inf
    """How long the run took, on a clock that nobody set."""
    clock_was_set: bool = False
    """Whether the database's clock jumped, so that times in rows give no order."""

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
    runs = [
        Run(run["run_uuid"], run["status"], tags.get(run["run_uuid"], {}), metrics.get(run["run_uuid"], {}), None)
        for run in runs
    ]
    database.close()
    for run in runs:
        (path,) = [*folder.glob(f"artifacts/*/{run.id}/artifacts/receipt.json"), None][:1]
        run.receipt = None if path is None else path.read_text()
    return runs


def _by_run(database: sqlite3.Connection, query: str) -> dict[str, Row]:
    values: dict[str, Row] = {}
    for run, key, value in database.execute(query):
        values.setdefault(run, {})[key] = value
    return values


def read_nodes(home: Path) -> dict[str, Row]:
    """Read every complete receipt on the nodes' disks."""
    receipts = {}
    for path in home.glob("*/work/*/*/receipt.json"):
        try:
            receipts[f"{path.parent.parent.name}/{path.parent.name}"] = json.loads(path.read_text())
        except (OSError, ValueError):  # a full disk, or a node that deletes it at this moment
            continue
    return receipts
