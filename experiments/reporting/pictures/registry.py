"""All pictures of an ablation, for the report and for MLflow."""

from ablate.experiments.reporting.pictures import curves, differences, forest, memory, roofline, trials
from ablate.experiments.reporting.pictures.drawing import Picture
from ablate.experiments.reporting.view import AblationView

DRAWN = (
    forest.forest,
    differences.differences,
    trials.step_times,
    trials.losses,
    trials.logged_curves,
    curves.validation_curves,
    memory.memory,
    memory.step_memory,
    roofline.roofline,
)
"""Pictures in the order of the page."""


def draw_all(view: AblationView) -> tuple[Picture, ...]:
    """Return every picture that has data; captions name omissions."""
    return tuple(picture for drawn in DRAWN if (picture := drawn(view)) is not None)
