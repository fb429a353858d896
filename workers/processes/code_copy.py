"""Copies of the code that commands run in, by content: a trial never runs files that change under it."""

import hashlib
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from experiments.design.program import read_program
from model.errors import DataError
from workers.paths import is_allowed
from workers.processes.result import TrialOrder, TrialResult

MOST_FILES = 20_000
MOST_BYTES = 64 * 2**20
KEPT = 20
"""Copies that a node keeps; the oldest goes first."""
LEFT_OUT = frozenset({".git", ".hg", ".svn", ".venv", "venv", "node_modules", "__pycache__", ".ablate"})
"""Folders that are never copied."""
_GIT_S = 300.0


def copy_code(order: TrialOrder) -> TrialResult:
    """Copy the code of a command below `order.data_dir`; return the copy, whose name is the digest of its content.

    Raises DataError for a folder or commit that does not exist, or is too large.
    """
    code = read_program(order.config).code
    _check_allowed(Path(code["git"] if isinstance(code, Mapping) else str(code)), order.code_roots)
    root = order.data_dir / "code"
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".new-") as new:
        target = Path(new) / "code"
        if isinstance(code, Mapping):
            _export(code["git"], code["commit"], target, Path(new) / "code.tar")
        else:
            _copy(Path(str(code)), target)
        digest = tree_digest(target)
        final = root / digest.removeprefix("sha256:")
        if final.is_dir():
            os.utime(final)
        else:
            target.rename(final)
    _prune(root, keep=final)
    return TrialResult.partial(data_digest=digest, data_folder=final)


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
    for path in _paths(source):
        files, size = files + 1, size + path.lstat().st_size
        if files > MOST_FILES or size > MOST_BYTES:
            raise DataError(f"code {str(source)!r} has more than {_limit()}; keep data and outputs outside of it")
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        _check_link(path, source)
        shutil.copy2(path, place, follow_symlinks=False)
    target.mkdir(exist_ok=True)


def _limit() -> str:
    return f"{MOST_FILES:,} files and {MOST_BYTES // 2**20} MiB"


def _paths(folder: Path) -> Iterator[Path]:
    """Yield the files and links below a folder, sorted; other kinds of files are left out."""
    for entry in sorted(os.scandir(folder), key=lambda one: one.name):
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in LEFT_OUT:
                yield from _paths(Path(entry.path))
        elif entry.is_symlink() or entry.is_file(follow_symlinks=False):
            yield Path(entry.path)


def _check_link(path: Path, root: Path) -> None:
    if path.is_symlink() and not path.resolve().is_relative_to(root.resolve()):
        raise DataError(f"code has a link to another place: {path.relative_to(root)} -> {path.readlink()}")


def _export(repository: str, commit: str, target: Path, archive: Path) -> None:
    """Write the files of a commit."""
    command = [
        "git",
        "-c",
        "safe.directory=*",
        "-C",
        repository,
        "archive",
        "--output",
        str(archive),
        f"{commit}^{{commit}}",
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_GIT_S)
    except FileNotFoundError as error:
        raise DataError("code is a commit, but git is not installed on this node") from error
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no reason"]
        raise DataError(f"commit {commit} of {repository} cannot be read: {reason[0][:300]}") from error
    with tarfile.open(archive) as files:
        members = files.getmembers()
        if len(members) > MOST_FILES or sum(member.size for member in members) > MOST_BYTES:
            raise DataError(f"commit {commit} has more than {_limit()}")
        try:
            files.extractall(target, filter="data")
        except tarfile.FilterError as error:
            raise DataError(f"commit {commit} cannot be unpacked safely: {error}") from error
    target.mkdir(exist_ok=True)


def tree_digest(folder: Path) -> str:
    """Return the digest over names, kinds and contents of all files below a folder."""
    whole = hashlib.sha256()
    for path in _paths(folder):
        if path.is_symlink():
            kind, content = "link", os.fsencode(path.readlink())
        else:
            kind = "program" if path.stat().st_mode & stat.S_IXUSR else "file"
            content = path.read_bytes()
        name = os.fsencode(path.relative_to(folder)).hex()
        whole.update(f"{name} {kind} {hashlib.sha256(content).hexdigest()}\n".encode())
    return f"sha256:{whole.hexdigest()}"


def _prune(root: Path, *, keep: Path) -> None:
    """Remove the oldest copies beyond `KEPT`. A running trial has a copy of its own."""
    copies = sorted(
        (path for path in root.iterdir() if path.is_dir() and path != keep), key=lambda p: p.stat().st_mtime
    )
    for path in copies[: max(0, len(copies) + 1 - KEPT)]:
        if not path.name.startswith(".new-"):
            shutil.rmtree(path, ignore_errors=True)
