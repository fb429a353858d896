"""Limits of a spec's text in every format, and the refusals that all formats share."""

from ablate.experiments.design.problems import pointer, shown
from ablate.experiments.errors import SpecError, SpecProblem

MAX_DEPTH = 16
MAX_DIGITS = 400

Place = tuple[str | int, ...]
"""Keys and indices from the top of a spec."""


def refusal(detail: str, hint: str | None = None, *, at: Place = ()) -> SpecError:
    """Return the error of one problem."""
    return SpecError([SpecProblem(pointer=pointer(*at), detail=detail, hint=hint)])


def too_deep(at: Place = ()) -> SpecError:
    """Return the error of a spec that is nested too deeply."""
    return refusal(f"the spec is nested too deeply; allowed: {MAX_DEPTH} levels", at=at)


def too_many_digits(*, at: Place = ()) -> SpecError:
    """Return the error of a number that is too long."""
    return refusal(f"the spec holds a number with too many digits; allowed: {MAX_DIGITS}", at=at)


def duplicate_key(key: str, at: Place = ()) -> SpecError:
    """Return the error of a key that a mapping has twice."""
    return refusal(f"key {shown(key)} appears more than once", "keep one of them", at=at)
