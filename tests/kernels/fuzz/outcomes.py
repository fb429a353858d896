"""What became of one problem of the fuzz."""

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

from tests.kernels.fuzz.problems import ScanProblem

Ending: TypeAlias = Literal["right", "refused", "wrong", "unrepeatable", "failed", "hung"]
SAID = 400
"""Characters kept of an error's end."""


class FuzzOutcome(BaseModel):
    """What became of one problem."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    problem: ScanProblem
    ending: Ending
    """right; refused, before anything was compiled; wrong; unrepeatable: a second run gave other bits; failed: an
    error, or a promise broken; hung: ended after it had said nothing for too long."""
    why: str = ""
    """The reason, unless it is right."""
    errors: dict[str, tuple[float, float]] = {}
    """Result -> its error and that of its worst row, as multiples of their noise."""
    walk: str = ""
    """The form that its backward walk took, unless it was refused."""
    alone: Ending | None = None
    """How it ended when it was run once more with the GPU to itself; only what is not right is."""


def failed(problem: ScanProblem, error: Exception, doing: str = "") -> FuzzOutcome:
    """Return the outcome of an error: its class and the end of what it says."""
    return FuzzOutcome(problem=problem, ending="failed", why=f"{doing}{type(error).__name__}: {str(error)[-SAID:]}")
