"""The experiment of MLflow that ablations go to, made with its saved views, or given today's, before an ablation comes.

So `ablate up` can say where ablations will be listed. Over HTTP: the supervisor does not import mlflow.
"""

from typing import Any

import httpx

from experiments.reporting.mlflow.views import experiment_tags, tags_to_set

_API = "/api/2.0/mlflow/experiments"
_ANSWER_S = 30.0
_TRIES = 2
"""A background process may make it at the same moment."""


def make_experiment(url: str, name: str) -> str | None:
    """Return the id of the experiment `name` of the server at `url`, made where there is none; None if it was deleted.

    One that is there gets the views that it lacks, and today's in place of older ones that nobody has changed.

    Raises:
        httpx.HTTPError: MLflow does not answer, or refuses.

    """
    with httpx.Client(base_url=url.rstrip("/") + _API, timeout=_ANSWER_S, trust_env=False) as server:
        for _ in range(_TRIES):
            found = server.get("/get-by-name", params={"experiment_name": name})
            if found.status_code != httpx.codes.NOT_FOUND:
                return _brought_up_to_date(server, found.raise_for_status().json()["experiment"])
            tags = [{"key": key, "value": value} for key, value in experiment_tags().items()]
            made = server.post("/create", json={"name": name, "tags": tags})
            if made.is_success:
                return str(made.json()["experiment_id"])
        made.raise_for_status()
    return None


def _brought_up_to_date(server: httpx.Client, experiment: dict[str, Any]) -> str | None:
    if experiment["lifecycle_stage"] != "active":
        return None
    there = {tag["key"]: tag["value"] for tag in experiment.get("tags", [])}
    for key, value in tags_to_set(there).items():
        wanted = {"experiment_id": experiment["experiment_id"], "key": key, "value": value}
        server.post("/set-experiment-tag", json=wanted).raise_for_status()
    return str(experiment["experiment_id"])
