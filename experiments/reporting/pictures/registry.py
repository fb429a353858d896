"""All pictures of an ablation that its data allows, for the report and for MLflow."""

from experiments.reporting.pictures import differences, forest, memory, trials
from experiments.reporting.pictures.drawing import Picture
from experiments.reporting.view import AblationView

DRAWN = (
    forest.forest,
    differences.differences,
    trials.step_times,
    trials.losses,
    memory.memory,
)
"""In the order in which they are shown."""


def draw_all(view: AblationView) -> tuple[Picture, ...]:
    """Draw every picture whose data is there; each states in its caption what was left out."""
    return tuple(picture for drawn in DRAWN if (picture := drawn(view)) is not None)
