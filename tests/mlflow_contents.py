"""What an MLflow server shows of ablations, run by run, without what MLflow itself chose (ids, its own times)."""

from typing import Any

import httpx

from ablate.experiments.reporting.mlflow.content import ID_TAG, RUN_TAG
from tests.waiting import LIMIT_S

_PAGE = 1000


def contents(url: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return every living run by (ablation, identity): parameters, metrics with their history, tags, files, status."""
    api = f"{url}/api/2.0/mlflow"
    experiments = httpx.get(
        f"{api}/experiments/search", params={"max_results": 100}, timeout=LIMIT_S, trust_env=False
    ).json()["experiments"]
    ids = [one["experiment_id"] for one in experiments]
    body = {"experiment_ids": ids, "max_results": _PAGE}
    runs = httpx.post(f"{api}/runs/search", json=body, timeout=LIMIT_S, trust_env=False).json().get("runs", [])
    parents = {run["info"]["run_id"]: _identity(run) for run in runs}
    return {_identity(run): _told(api, run, parents) for run in runs}


def _identity(run: dict[str, Any]) -> tuple[str, str]:
    tags = {tag["key"]: tag["value"] for tag in run["data"]["tags"]}
    return tags[ID_TAG], tags[RUN_TAG]


def _told(api: str, run: dict[str, Any], parents: dict[str, tuple[str, str]]) -> dict[str, Any]:
    info, data = run["info"], run["data"]
    tags = {tag["key"]: tag["value"] for tag in data["tags"]}
    if "mlflow.parentRunId" in tags:
        tags["mlflow.parentRunId"] = str(parents[tags["mlflow.parentRunId"]])
    return {
        "name": info["run_name"],
        "status": info["status"],
        "times": (info["start_time"], info.get("end_time")),
        "tags": tags,
        "params": {one["key"]: one["value"] for one in data.get("params", [])},
        "metrics": {one["key"]: _history(api, info["run_id"], one["key"]) for one in data.get("metrics", [])},
        "files": _files(api, info["run_id"]),
    }


def _history(api: str, run_id: str, key: str) -> list[tuple[float, int, int]]:
    answer = httpx.get(
        f"{api}/metrics/get-history", params={"run_id": run_id, "metric_key": key}, timeout=LIMIT_S, trust_env=False
    ).json()
    return sorted((one["value"], one["step"], one["timestamp"]) for one in answer["metrics"])


def _files(api: str, run_id: str) -> list[tuple[str, int]]:
    answer = httpx.get(f"{api}/artifacts/list", params={"run_id": run_id}, timeout=LIMIT_S, trust_env=False).json()
    return sorted((one["path"], int(one.get("file_size", 0))) for one in answer.get("files", []))
