"""All pictures of an ablation that its data allows, for the report and for MLflow."""

from experiments.reporting import pictures_differences, pictures_forest, pictures_memory, pictures_trials
from experiments.reporting.drawing import Picture
from experiments.reporting.view import AblationView

DRAWN = (
    pictures_forest.forest,
    pictures_differences.differences,
    pictures_trials.step_times,
    pictures_trials.losses,
    pictures_memory.memory,
)
"""In the order in which they are shown."""


def draw_all(view: AblationView) -> tuple[Picture, ...]:
    """Draw every picture whose data is there; each states in its caption what was left out."""
    return tuple(picture for drawn in DRAWN if (picture := drawn(view)) is not None)
