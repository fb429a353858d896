"""Links to our own pages, below the path where a reverse proxy serves them, and to MLflow's pages.

MLflow's links open its view of training runs, whichever view its server shows first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ablate.experiments.reporting.mlflow.views import ABLATIONS, SavedView

TRAINING = "workflowType=machine_learning"
_root: ContextVar[str] = ContextVar("root", default="")


@contextmanager
def served_below(root: str) -> Iterator[None]:
    """Put this path, for example /ablate, before the links of all answers inside."""
    previous = _root.set(root)
    try:
        yield
    finally:
        _root.reset(previous)


def below(path: str) -> str:
    """Return the link to a path of ours, as the reader's browser or program reaches it."""
    return _root.get() + path


def inner_path(path: str, root: str) -> str:
    """Return our own path in a request, whether or not the proxy has removed `root` from it."""
    if root and (path == root or path.startswith(f"{root}/")):
        return path.removeprefix(root) or "/"
    return path


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
