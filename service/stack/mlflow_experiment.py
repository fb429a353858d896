"""The experiment of MLflow that ablations go to, made with its saved views before there is an ablation.

So `ablate up` can say where ablations will be listed. Over HTTP: the supervisor does not import mlflow.
"""

import httpx

from experiments.reporting.mlflow_views import experiment_tags

_API = "/api/2.0/mlflow/experiments"
_ANSWER_S = 30.0
_TRIES = 2
"""A background process may make it at the same moment."""


def make_experiment(url: str, name: str) -> str | None:
    """Return the id of the experiment `name` of the server at `url`, made where there is none; None if it was deleted.

    Raises:
        httpx.HTTPError: MLflow does not answer, or refuses.

    """
    with httpx.Client(base_url=url.rstrip("/") + _API, timeout=_ANSWER_S, trust_env=False) as server:
        for _ in range(_TRIES):
            found = server.get("/get-by-name", params={"experiment_name": name})
            if found.status_code != httpx.codes.NOT_FOUND:
                experiment = found.raise_for_status().json()["experiment"]
                return str(experiment["experiment_id"]) if experiment["lifecycle_stage"] == "active" else None
            tags = [{"key": key, "value": value} for key, value in experiment_tags().items()]
            made = server.post("/create", json={"name": name, "tags": tags})
            if made.is_success:
                return str(made.json()["experiment_id"])
        made.raise_for_status()
    return None
