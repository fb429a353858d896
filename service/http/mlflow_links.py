"""Addresses of MLflow's pages for people: they open its pages for training runs, whichever its server shows first."""

from experiments.reporting.mlflow.views import ABLATIONS, SavedView

TRAINING = "workflowType=machine_learning"


def of_run(base: str, experiment_id: str, run_id: str) -> str:
    """Return where a run is shown; `base` is the server's URL."""
    return f"{_experiments(base)}/{experiment_id}/runs/{run_id}?{TRAINING}"


def of_view(base: str, experiment_id: str, view: SavedView) -> str:
    """Return where the runs of an experiment are listed as in a saved view."""
    return f"{_experiments(base)}/{experiment_id}/runs?viewStateShareKey={view.id}&{TRAINING}"


def of_ablations(base: str, experiment_id: str | None) -> str:
    """Return where all ablations are listed; without an experiment, where there may be one later."""
    return f"{_experiments(base)}?{TRAINING}" if experiment_id is None else of_view(base, experiment_id, ABLATIONS)


def _experiments(base: str) -> str:
    return f"{base.rstrip('/')}/#/experiments"
