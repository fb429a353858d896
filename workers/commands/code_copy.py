"""The files of a program: copies of its code by content, which do not change under a trial, and links to its data."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ablate.experiments.design.kinds.program import ProgramArm
from ablate.experiments.design.program_files import ARCHIVE
from ablate.experiments.errors import CodeArchiveError
from ablate.experiments.records.code_archive import unpack_code
from ablate.experiments.records.code_tree import (
    LEFT_OUT,
    MOST_BYTES,
    MOST_FILES,
    check_link,
    check_tree,
    code_files,
    code_limit,
    tree_digest,
)
from ablate.experiments.records.commit_files import write_commit
from ablate.model.errors import DataError
from ablate.workers.commands.locked_environment import locked_environment
from ablate.workers.environment_variables import TRIAL_READABLE
from ablate.workers.paths import is_allowed
from ablate.workers.trials.result import TrialOrder, TrialResult

KEPT = 80
"""Copies that a node keeps, more than a block has arms; the oldest goes first."""
_PRIVATE = (
    *(".ssh", ".gnupg", ".aws", ".azure", ".config", ".docker", ".kube", ".netrc", ".git-credentials", ".pypirc"),
    *(".cache/huggingface/token", ".cache/huggingface/stored_tokens", ".local/share/keyrings", ".password-store"),
)
"""Files and folders with keys in the home of the worker's user."""
_OF_THE_SYSTEM = ("/etc", "/proc", "/sys", "/dev", "/run", "/boot")


def archive_path(data_dir: Path, digest: str) -> Path:
    """Return the place of an archive of code on this node."""
    return data_dir / "code-archives" / f"{digest.removeprefix('sha256:')}.tar.gz"


def copy_code(order: TrialOrder) -> TrialResult:
    """Copy the code of a command below `order.data_dir`; return the copy, whose name is the digest of its content.

    Raises DataError for a folder, commit or archive that does not exist, is too large, or leads to another place.
    """
    root = order.data_dir / "code"
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".new-") as new:
        target = Path(new) / "code"
        try:
            _fill(order, target)
        except CodeArchiveError as error:
            raise DataError(str(error)) from error
        digest = tree_digest(target)
        final = root / digest.removeprefix("sha256:")
        if _is_whole(final, digest):
            os.utime(final)
        else:
            target.rename(final)
    _prune(root, keep=final)
    return TrialResult.partial(data_digest=digest, data_folder=final, program_prefix=_environment(order, final))


def _environment(order: TrialOrder, code: Path) -> Path | None:
    """Return the Python environment that the lock of the program names; None without one."""
    name, folder = order.program.lock, order.environments or order.data_dir / "environments"
    if name is None:
        return None
    lock = code / name
    if not lock.is_file():
        raise DataError(f"the code has no file {name!r}, which workload.environment or its variant names as lock")
    return locked_environment(name, lock.read_text(encoding="utf-8", errors="replace"), folder)


def _is_whole(copy: Path, digest: str) -> bool:
    """Return whether an earlier copy is still what its name says; one that a program changed is removed."""
    if not copy.is_dir():
        return False
    if tree_digest(copy) == digest:
        return True
    shutil.rmtree(copy)
    return False


def _fill(order: TrialOrder, target: Path) -> None:
    """Put the code into the new folder `target`."""
    code = order.program.code
    if isinstance(code, Mapping) and ARCHIVE in code:
        unpack_code(archive_path(order.data_dir, code[ARCHIVE]), target)
    elif isinstance(code, Mapping):
        _check_allowed(Path(code["git"]), order.code_roots)
        _export(Path(code["git"]), code["commit"], target)
    else:
        _check_allowed(Path(str(code)), order.code_roots)
        _copy(Path(str(code)), target)


def _check_allowed(source: Path, roots: Sequence[Path] | None) -> None:
    """Raise DataError unless `source`, links resolved, is below a folder that this node's operator allows."""
    if is_allowed(source, roots):
        return
    allowed = ", ".join(f"a folder below {root}" for root in roots or ()) or "none on this node"
    raise DataError(f"code {str(source)!r} is outside of the operator's folders; allowed: {allowed} (ABLATE_CODE_DIRS)")


def _copy(source: Path, target: Path) -> None:
    """Copy a folder without version control, environments and caches."""
    if not source.is_dir():
        raise DataError(f"code {str(source)!r} is no folder on this node")
    files, size = 0, 0
    for path in code_files(source):
        if not path.is_symlink() and not path.is_file():
            continue
        files, size = files + 1, size + path.lstat().st_size
        if files > MOST_FILES or size > MOST_BYTES:
            raise DataError(f"code {str(source)!r} has more than {code_limit()}; keep data and outputs outside of it")
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            check_link(path, source)
        shutil.copy2(path, place, follow_symlinks=False)
    target.mkdir(exist_ok=True)


def _export(repository: Path, commit: str, target: Path) -> None:
    """Write the files of a commit, as they are packed where people work."""
    files = write_commit(repository, commit, target, any_owner=True)  # the operator allows the folder
    check_tree(target, files.names, f"commit {commit} of {str(repository)!r}")


def _prune(root: Path, *, keep: Path) -> None:
    """Remove the oldest copies beyond `KEPT`. A running trial has a copy of its own."""
    copies = sorted(
        (path for path in root.iterdir() if path.is_dir() and path != keep), key=lambda p: p.stat().st_mtime
    )
    for path in copies[: max(0, len(copies) + 1 - KEPT)]:
        if not path.name.startswith(".new-"):
            shutil.rmtree(path, ignore_errors=True)


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
