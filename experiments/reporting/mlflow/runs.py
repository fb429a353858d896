"""The children of an ablation's parent run in MLflow, and its plots, as plain data."""

from collections.abc import Iterator

from experiments.outcomes import AblationState
from experiments.reporting.mlflow.arms import arm_runs
from experiments.reporting.mlflow.content import RunContent
from experiments.reporting.mlflow.parent import OPEN, STATUS
from experiments.reporting.mlflow.trials import trial_runs
from experiments.reporting.pictures import registry
from experiments.reporting.view import AblationView


def is_open(state: AblationState) -> bool:
    """Return whether an ablation is still running; MLflow then has only its parent run."""
    return STATUS[state] in OPEN


def children(view: AblationView) -> Iterator[RunContent]:
    """Yield the runs of trials, then of arms; none while the ablation is running."""
    if not is_open(view.state):
        yield from trial_runs(view)
        yield from arm_runs(view)


def plots(view: AblationView) -> dict[str, str]:
    """Return the pictures of the report as SVG files by path; none while the ablation is running."""
    drawn = () if is_open(view.state) else registry.draw_all(view)
    return {f"plots/{picture.name}.svg": picture.standalone() for picture in drawn}
