"""Errors of the experiments layer."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SpecProblem:
    """One thing that is wrong with a spec, or with another document that was handed in."""

    pointer: str
    """RFC 6901 pointer as a URI fragment, for example "#/variants/psiv-on/gates/psiv_cache"; in a bundle, a path."""
    detail: str
    """What was wrong, what was given, what is allowed."""
    hint: str | None = None
    """What to do about it."""


class ExperimentError(Exception):
    """An experiment could not be planned, judged or recorded."""


class DocumentError(ExperimentError, ValueError):
    """A document is not acceptable; every problem found is listed."""

    def __init__(self, problems: Sequence[SpecProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{p.pointer}: {p.detail}" for p in self.problems))


class SpecError(DocumentError):
    """The spec is not acceptable; every problem found is listed."""


class BundleError(DocumentError):
    """A bundle is damaged or was altered; every file that is not as it was written is listed."""


class ReceiptError(ExperimentError, ValueError):
    """A receipt is damaged or was altered."""


class ProjectionError(ExperimentError):
    """MLflow could not be reached or refused a call; nothing is lost, and the projection can be repeated."""


class ProjectionUnfinished(ExperimentError):
    """A large ablation is in MLflow in part; the next projection goes on where this one stopped."""


class SigningUnavailable(ExperimentError):
    """This machine can neither sign nor check signatures."""


class PlanFileError(ExperimentError, ValueError):
    """A plan file is damaged, was altered, or does not fit this code or this machine."""
