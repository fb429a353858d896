"""The names of all files of a trial."""

import errno
import math
import os
import shutil
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO


def open_plain(path: Path, flags: int = os.O_RDONLY) -> BinaryIO:
    """Open a file that a trial may have written; never through a link, and without waiting for the end of a pipe.

    A trial could otherwise let the worker read or write a file that is closed to the trial itself.

    Raises:
        FileNotFoundError: it is missing, or no regular file.

    """
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.EISDIR, errno.ENXIO}:
            raise FileNotFoundError(errno.ENOENT, "no regular file", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise FileNotFoundError(errno.ENOENT, "no regular file", str(path))
    return os.fdopen(handle, "ab" if flags & os.O_APPEND else "rb")


def is_allowed(path: Path, roots: Sequence[Path] | None) -> bool:
    """Return whether `path`, links and `..` resolved, is below one of `roots`; None allows any path."""
    return roots is None or any(path.resolve().is_relative_to(root.resolve()) for root in roots)


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a trial uses of its machine."""

    bytes: int
    """Of its files."""
    files: int
    processes: int | None = None
    """None if they do not count."""


MOST_PROCESSES = 1024
"""Twice those of eight ranks, each with 32 that load data and 32 that compile."""
MOST_OUTPUT = Usage(bytes=4 * 2**30, files=200_000, processes=MOST_PROCESSES)
"""What a running trial may use by default."""


def usage_of(folder: Path) -> Usage:
    """Return the usage of all files below `folder`, without following links; a file that vanishes does not count."""
    size, files, folders = 0, 0, [str(folder)]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    files += 1
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
    return Usage(bytes=size, files=files)


def has_file_of(folder: Path, num_bytes: int) -> bool:
    """Return whether a file below `folder` has at least this size."""
    sizes = (Path(parent, name).lstat().st_size for parent, _folders, names in os.walk(folder) for name in names)
    return any(size >= num_bytes for size in sizes)


@dataclass(frozen=True, kw_only=True)
class TrialPaths:
    """Files of one trial of one attempt."""

    folder: Path

    @property
    def log(self) -> Path:
        """Standard output and error of the trial."""
        return self.folder / "log.txt"

    @property
    def steps(self) -> Path:
        """One JSON object per optimiser step, appended as it ends."""
        return self.folder / "steps.jsonl"

    @property
    def result(self) -> Path:
        """The trial's own result; appears whole or not at all."""
        return self.folder / "result.json"

    @property
    def prepared(self) -> Path:
        """Result of the dataset's preparation, in the first trial that needed the dataset."""
        return self.folder / "prepared.json"

    @property
    def caches(self) -> Path:
        """Caches of compilers, for a trial that starts with empty ones."""
        return self.folder / "caches"

    @property
    def receipt(self) -> Path:
        """The sealed receipt."""
        return self.folder / "receipt.json"

    @property
    def temporary(self) -> Path:
        """Temporary files."""
        return self.folder / "tmp"

    def make_room(self, path: Path) -> None:
        """Remove files that the trial has left at `path`, and where the worker is going to write its parts."""
        for left in (path, path.with_name(f"{path.name}.part")):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            else:
                left.unlink(missing_ok=True)

    def drop_output(self) -> None:
        """Remove everything except the files that the worker reads."""
        kept = {self.log, self.steps, self.result, self.receipt}
        for path in self.folder.iterdir():
            if path not in kept:
                with suppress(OSError):  # the folder is removed with its attempt
                    self.make_room(path)


@dataclass(frozen=True, kw_only=True)
class WorkPaths:
    """Folders of attempts below the state folder."""

    home: Path

    @property
    def root(self) -> Path:
        """Folder of all attempts."""
        return self.home / "work"

    def trial(self, attempt_id: str, trial_id: str) -> TrialPaths:
        """Create and return the folder of a trial.

        Raises:
            ValueError: an id is not a plain file name.

        """
        folder = self.root / _plain(attempt_id) / _plain(trial_id)
        folder.mkdir(parents=True, exist_ok=True)
        return TrialPaths(folder=folder)

    def clean(self, *, keep: int, most_bytes: float = math.inf) -> None:
        """Remove all attempts except the `keep` newest, and of those the oldest beyond `most_bytes` in all."""
        if not self.root.is_dir():
            return
        attempts = [path for path in self.root.iterdir() if path.is_dir()]
        attempts.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        left = most_bytes
        for place, path in enumerate(attempts):
            left -= usage_of(path).bytes if place < keep else 0
            if place >= keep or left < 0:
                shutil.rmtree(path, ignore_errors=True)


def _plain(name: str) -> str:
    if not name or name in {".", ".."} or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} cannot be a folder name; expected an id such as 'att_01H...'")
    return name
