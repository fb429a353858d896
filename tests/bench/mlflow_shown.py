"""What an MLflow server shows of an experiment, read from its database and its files, without a call."""

import sqlite3
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

from experiments.digest import digest_bytes
from experiments.reporting.mlflow.content import ID_TAG, RUN_TAG

_RUNS = """SELECT run_uuid, runs.name, status, start_time, end_time, artifact_uri FROM runs
    JOIN experiments USING (experiment_id) WHERE experiments.name = ? AND runs.lifecycle_stage = 'active'"""
_TOLD = {
    "tags": "SELECT run_uuid, key, value FROM tags",
    "params": "SELECT run_uuid, key, value FROM params",
    "metrics": "SELECT run_uuid, key, value, is_nan, step, timestamp FROM metrics",
}
_PARENT = "mlflow.parentRunId"


def shown(folder: Path, experiment: str) -> list[tuple[tuple[str, str], dict[str, Any]]]:
    """Return every living run by (ablation, identity): name, status, times, tags, parameters, metrics, files.

    Ids that MLflow chose are left out, and a parent is named by its identity. Two runs of one identity are both there.
    """
    with closing(sqlite3.connect(f"file:{folder / 'mlflow.db'}?mode=ro", uri=True, timeout=60)) as database:
        runs = database.execute(_RUNS, (experiment,)).fetchall()
        told = {name: _by_run(database, query) for name, query in _TOLD.items()}
    tags = {run[0]: dict(told["tags"][run[0]]) for run in runs}
    names = {run_id: (own[ID_TAG], own[RUN_TAG]) for run_id, own in tags.items()}
    found = []
    for run_id, name, status, began, ended, files in runs:
        own = tags[run_id] | ({_PARENT: names[tags[run_id][_PARENT]]} if _PARENT in tags[run_id] else {})
        values = {kind: sorted(told[kind][run_id]) for kind in ("params", "metrics")}
        common = {"name": name, "status": status, "times": (began, ended), "tags": own, "files": _files(folder, files)}
        found.append((names[run_id], common | values))
    return sorted(found, key=lambda run: run[0])


def _by_run(database: sqlite3.Connection, query: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = defaultdict(list)
    for run_id, *values in database.execute(query):
        found[run_id].append(tuple(values))
    return found


def _files(folder: Path, address: str) -> dict[str, str]:
    """Return the digests of a run's files by path."""
    root = folder / "artifacts" / address.partition(":/")[2]
    return {str(path.relative_to(root)): digest_bytes(path.read_bytes()) for path in root.rglob("*") if path.is_file()}
