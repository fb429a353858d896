"""Errors of the experiments layer."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SpecProblem:
    """One problem of a spec or of another submitted document."""

    pointer: str
    """RFC 6901 pointer as a URI fragment, for example "#/variants/psiv-on/gates/psiv_cache"; in a bundle, a path."""
    detail: str
    """The problem, the value, and the allowed values."""
    hint: str | None = None
    """How to fix it."""


class ExperimentError(Exception):
    """An experiment could not be planned, judged or recorded."""


class BadSetting(ExperimentError, ValueError):
    """A setting or a secret cannot be used as it is."""


class DocumentError(ExperimentError, ValueError):
    """A document is not acceptable; the error lists all problems."""

    def __init__(self, problems: Sequence[SpecProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{p.pointer}: {p.detail}" for p in self.problems))


class SpecError(DocumentError):
    """The spec is not acceptable; the error lists all problems."""


class BundleError(DocumentError):
    """A bundle is damaged or was altered; the error lists all such files."""


class ReceiptError(ExperimentError, ValueError):
    """A receipt is damaged or was altered."""


class IsolationFailed(ExperimentError):
    """A process could not be kept away from the rest of this machine, so it did not run."""


class ProjectionError(ExperimentError):
    """MLflow is unreachable or rejected a call; nothing is lost, and the projection can be repeated."""


class ProjectionUnfinished(ExperimentError):
    """MLflow has a part of a large ablation; the next projection continues there."""


class SigningUnavailable(ExperimentError):
    """This machine can neither sign nor check signatures."""


class PlanFileError(ExperimentError, ValueError):
    """A plan file is damaged, was altered, or does not fit this code or this machine."""


class CodeArchiveError(ExperimentError, ValueError):
    """A folder cannot be packed as a program's code, or an archive cannot be unpacked."""

    def __init__(self, detail: str, hint: str | None = None) -> None:
        self.detail = detail
        self.hint = hint
        """How to fix it."""
        super().__init__(detail if hint is None else f"{detail}; {hint}")


class GitError(CodeArchiveError):
    """Git cannot do what a folder or a commit of code needs."""

    def __init__(self, detail: str, hint: str | None, stderr: str) -> None:
        self.stderr = stderr
        super().__init__(detail, hint)
