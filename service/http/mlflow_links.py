"""Links to MLflow's pages; they open its view of training runs, whichever view its server shows first."""

from experiments.reporting.mlflow.views import ABLATIONS, SavedView

TRAINING = "workflowType=machine_learning"


def of_run(base: str, experiment_id: str, run_id: str) -> str:
    """Return the link to a run; `base` is the server's URL."""
    return f"{_experiments(base)}/{experiment_id}/runs/{run_id}?{TRAINING}"


def of_view(base: str, experiment_id: str, view: SavedView) -> str:
    """Return the link to an experiment's runs in a saved view."""
    return f"{_experiments(base)}/{experiment_id}/runs?viewStateShareKey={view.id}&{TRAINING}"


def of_ablations(base: str, experiment_id: str | None) -> str:
    """Return the link to the list of ablations; without an experiment, to the list of experiments."""
    return f"{_experiments(base)}?{TRAINING}" if experiment_id is None else of_view(base, experiment_id, ABLATIONS)


def _experiments(base: str) -> str:
    return f"{base.rstrip('/')}/#/experiments"
