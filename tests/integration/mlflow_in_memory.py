"""MLflow in memory, as far as the projection calls it, with a hook before every call: for drawn interleavings."""

import itertools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from experiments.reporting.mlflow.content import ID_TAG, RUN_TAG

EXPERIMENT = "1"


class Page(list[Any]):
    """One page of runs, the only one."""

    token = None


class Server:
    """Runs by id; a deleted run takes no calls, as in MLflow."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self._numbers = itertools.count(1)

    def client(self, before: Callable[[], None]) -> "Client":
        """Return a client that calls `before` before each of its calls."""
        return Client(self, before)

    def create(self, tags: dict[str, str], name: str, started_ms: int) -> str:
        run_id = f"run{next(self._numbers):05}"
        shown = {"name": name, "tags": dict(tags), "status": "RUNNING", "start": started_ms, "end": None}
        self.runs[run_id] = {**shown, "params": {}, "metrics": set(), "files": {}, "inputs": set(), "deleted": False}
        return run_id

    def living(self, run_id: str) -> dict[str, Any]:
        run = self.runs[run_id]
        if run["deleted"]:
            raise OSError(f"run {run_id} must be in the active state")
        return run

    def of(self, ablation_id: str) -> dict[str, dict[str, Any]]:
        return {k: r for k, r in self.runs.items() if not r["deleted"] and r["tags"].get(ID_TAG) == ablation_id}

    def shown(self, ablation_id: str) -> list[tuple[str, dict[str, Any]]]:
        """Return what a reader sees of an ablation, with identities in the place of ids."""
        found = self.of(ablation_id)
        parents = {run_id: run["tags"][RUN_TAG] for run_id, run in found.items()}
        told = []
        for run in found.values():
            tags = dict(run["tags"])
            if parent := tags.pop("mlflow.parentRunId", None):
                tags["child of"] = parents.get(parent, "nobody")
            told.append((tags[RUN_TAG], {**run, "tags": tags}))
        return sorted(told, key=lambda one: one[0])


class Client:
    """The calls that the sink makes."""

    def __init__(self, server: Server, before: Callable[[], None]) -> None:
        self._server = server
        self._before = before

    def get_experiment_by_name(self, _name: str) -> Any:
        self._before()
        from experiments.reporting.mlflow.views import experiment_tags

        return SimpleNamespace(experiment_id=EXPERIMENT, lifecycle_stage="active", tags=experiment_tags())

    def search_runs(self, _ids: list[str], filter_string: str, **_paging: Any) -> Page:
        self._before()
        ablation_id = re.findall(r"'(.*)'", filter_string)[0]
        return Page(
            SimpleNamespace(
                info=SimpleNamespace(run_id=run_id, run_name=run["name"]),
                data=SimpleNamespace(tags=dict(run["tags"])),
            )
            for run_id, run in self._server.of(ablation_id).items()
        )

    def create_run(self, _experiment: str, *, start_time: int, tags: dict[str, str], run_name: str) -> Any:
        self._before()
        run_id = self._server.create(tags, run_name, start_time)
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def delete_run(self, run_id: str) -> None:
        self._before()
        self._server.living(run_id)["deleted"] = True

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self._before()
        self._server.living(run_id)["tags"][key] = value

    def update_run(self, run_id: str, status: str | None = None, name: str | None = None) -> None:
        self._before()
        run = self._server.living(run_id)
        run.update({k: v for k, v in (("status", status), ("name", name)) if v is not None})

    def set_terminated(self, run_id: str, *, status: str, end_time: int) -> None:
        self._before()
        self._server.living(run_id).update(status=status, end=end_time)

    def log_batch(self, run_id: str, *, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        self._before()
        run = self._server.living(run_id)
        run["tags"].update({tag.key: tag.value for tag in tags})
        run["params"].update({param.key: param.value for param in params})
        run["metrics"] |= {(one.key, one.value, one.timestamp, one.step) for one in metrics}

    def log_inputs(self, run_id: str, datasets: Any) -> None:
        self._before()
        self._server.living(run_id)["inputs"] |= {one.dataset.digest for one in datasets}

    def log_text(self, run_id: str, text: str, path: str) -> None:
        self._before()
        self._server.living(run_id)["files"][path] = text
