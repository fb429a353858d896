"""Data of a program: which files of this node a spec may name, and their places beside the code."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from ablate.experiments.design.kinds.program import ProgramArm
from ablate.experiments.records.code_tree import LEFT_OUT
from ablate.model.errors import DataError
from ablate.workers.environment_variables import TRIAL_READABLE
from ablate.workers.paths import is_allowed

_PRIVATE = (
    *(".ssh", ".gnupg", ".aws", ".azure", ".config", ".docker", ".kube", ".netrc", ".git-credentials", ".pypirc"),
    *(".cache/huggingface/token", ".cache/huggingface/stored_tokens", ".local/share/keyrings", ".password-store"),
)
"""Files and folders with keys in the home of the worker's user."""
_OF_THE_SYSTEM = ("/etc", "/proc", "/sys", "/dev", "/run", "/boot")


def private_places() -> tuple[Path, ...]:
    """Return the files and folders with keys of this user, which no spec opens."""
    try:
        home = Path.home()
    except RuntimeError:  # a user without a home
        return ()
    return tuple(home / name for name in _PRIVATE)


def data_problem(config: ProgramArm, roots: Sequence[Path] | None, hidden: Sequence[Path]) -> str | None:
    """Return why a program may not read its data here, None if it may.

    `roots` are the folders that this node's operator allows, None for any; `hidden` ones stay closed in any case.
    """
    return next(_problems(config.libraries, roots, (*hidden, *private_places())), None)


def _problems(paths: Sequence[Path], roots: Sequence[Path] | None, hidden: Sequence[Path]) -> Iterator[str]:
    for path in paths:
        place = path.resolve()
        if any(place.is_relative_to(one.resolve()) for one in hidden):
            yield f"data {str(path)!r} is in a folder with keys, which stays closed to trials: move the files elsewhere"
        elif place == Path("/") or any(place.is_relative_to(one) for one in _OF_THE_SYSTEM):
            yield f"data {str(path)!r} is a folder of the system, which no spec opens: copy the files elsewhere"
        elif not is_allowed(path, roots):
            allowed = ", ".join(f"paths below {root}" for root in roots or ()) or "none on this node"
            yield f"data {str(path)!r} is outside of the operator's folders; allowed: {allowed} ({TRIAL_READABLE})"
        elif not path.exists():
            yield f"data {str(path)!r} is not on this node"


def link_data(config: ProgramArm, code: Path) -> None:
    """Link the data of a program into the copy of its code, beside files that were sent. Raises DataError."""
    for one in config.data:
        if not isinstance(one, str):
            try:
                _link(Path(one["path"]), code / one["at"])
            except OSError as error:
                raise DataError(f"data {one['at']!r} has no place beside the sent code: {error}") from error


def _link(source: Path, target: Path) -> None:
    if target.is_dir() and not target.is_symlink() and source.is_dir():
        for child in source.iterdir():
            if child.name not in LEFT_OUT:
                _link(child, target / child.name)
    elif not target.exists() and not target.is_symlink():  # a sent file stays
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(source)
