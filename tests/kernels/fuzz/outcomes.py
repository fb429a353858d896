"""Outcome of one problem of the fuzz."""

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

from tests.kernels.fuzz.problems import ScanProblem

Ending: TypeAlias = Literal["right", "refused", "wrong", "unrepeatable", "failed", "hung"]
MESSAGE_LIMIT = 400
"""Characters of an error's end to store."""


class FuzzOutcome(BaseModel):
    """Outcome of one problem."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    problem: ScanProblem
    ending: Ending
    """right; refused, before any compilation; wrong; unrepeatable: a second run gave other bits; failed: an error or a
    broken contract; hung: ended after a long silence."""
    why: str = ""
    """The reason, unless right."""
    errors: dict[str, tuple[float, float]] = {}
    """Result -> its error and that of its worst row, as multiples of their noise."""
    walk: str = ""
    """Form of its backward walk, unless refused."""
    alone: Ending | None = None
    """Ending of a second run alone on the GPU, for problems that are not right."""


def failed(problem: ScanProblem, error: Exception, doing: str = "") -> FuzzOutcome:
    """Return the outcome of an error: its class and the end of its message."""
    return FuzzOutcome(
        problem=problem, ending="failed", why=f"{doing}{type(error).__name__}: {str(error)[-MESSAGE_LIMIT:]}"
    )
