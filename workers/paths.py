"""The names of all files of a trial, and what it has in /dev/shm."""

import errno
import math
import os
import resource
import secrets
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ablate.experiments.system.own_tree import SHARED_MEMORY
from ablate.experiments.system.processes import process_numbers


def open_plain(path: Path, flags: int = os.O_RDONLY) -> BinaryIO:
    """Open a file that a trial may have written; never through a link, and without waiting for the end of a pipe.

    A trial could otherwise let the worker read or write a file that is closed to the trial itself.

    Raises:
        FileNotFoundError: it is missing, no regular file, or closed to its owner.

    """
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EACCES}:
            raise FileNotFoundError(errno.ENOENT, "no regular file", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise FileNotFoundError(errno.ENOENT, "no regular file", str(path))
    return os.fdopen(handle, "ab" if flags & os.O_APPEND else "rb")


def limit_files(most_bytes: int | None) -> None:
    """Limit the size of every file that this process and its children write; None for no limit of our own."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limits = [limit for limit in (most_bytes, hard) if limit not in (None, resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (min(limits, default=resource.RLIM_INFINITY), hard))


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
    size, files = 0, 0
    for state in _states_below(folder):
        size += state.st_blocks * 512
        files += 1
    return Usage(bytes=size, files=files)


def has_file_of(folder: Path, num_bytes: int) -> bool:
    """Return whether a file below `folder` has at least this size."""
    return any(state.st_size >= num_bytes for state in _states_below(folder) if not stat.S_ISDIR(state.st_mode))


def _states_below(folder: Path) -> Iterator[os.stat_result]:
    """Yield the state of everything below `folder`; a path may be too long, or vanish."""
    folders = [str(folder)]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    state = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(state.st_mode):
                        folders.append(entry.path)
                    yield state


def remove_tree(folder: Path) -> None:
    """Remove a folder that a trial has left, whatever its depth and its modes; what cannot be removed stays.

    Of a link in its place only the link goes.
    """
    if folder.is_symlink():
        folder.unlink()  # chmod would follow it
        return
    with suppress(RecursionError):  # Python before 3.13 calls itself for each level
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, "--", str(folder)], check=False, capture_output=True)


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

    @property
    def evaluation(self) -> Path:
        """Folder of the protected evaluation, while it runs."""
        return self.folder / "evaluation"

    def make_empty(self, path: Path) -> None:
        """Make `path` an empty folder, whatever the trial has left in its place."""
        self._open()
        if path.is_dir():
            remove_tree(path)
        self.make_room(path)
        path.mkdir()

    def make_room(self, path: Path) -> None:
        """Free `path`, and the place where its parts are going to be written, of everything that the trial has left.

        A folder is renamed: that takes no time and works whatever is in it.
        """
        self._open()
        for left in (path, path.with_name(f"{path.name}.part")):
            if left.is_dir() and not left.is_symlink():
                left.rename(left.with_name(f"{left.name}.{secrets.token_hex(4)}"))
            else:
                left.unlink(missing_ok=True)

    def _open(self) -> None:
        if not os.access(self.folder, os.W_OK | os.X_OK):
            self.folder.chmod(stat.S_IRWXU)

    def drop_output(self) -> None:
        """Remove everything except the files that the worker reads."""
        kept = {self.log, self.steps, self.result, self.receipt}
        with suppress(OSError):  # the folder is removed with its attempt
            for path in self.folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    remove_tree(path)
                elif path not in kept:
                    path.unlink(missing_ok=True)


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
                remove_tree(path)


def _plain(name: str) -> str:
    if not name or name in {".", ".."} or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} cannot be a folder name; expected an id such as 'att_01H...'")
    return name


class SharedMemory:
    """Files in /dev/shm of a trial that has no file tree of its own: they count as its files, and go when it ends.

    Programs of the same user make files there, too. So a file is the trial's only if one of its processes was seen with
    it, and it was not there when the trial began.
    """

    def __init__(self, folder: Path = SHARED_MEMORY) -> None:
        self._folder = folder
        self._before = set(self._files())
        self._own: set[Path] = set()

    def look(self, pids: Iterable[int]) -> int:
        """Note the files that these processes of the trial use now; return the bytes of all that it made so far."""
        self._own |= self._used_by(pids) - self._before
        sizes = 0
        for path in self._own:
            with suppress(OSError):  # it was removed
                sizes += path.lstat().st_blocks * 512
        return sizes

    def sweep(self) -> None:
        """Remove the files of a trial that has ended, except those that another process uses."""
        if self._own:
            for path in self._own - self._used_by(process_numbers()):
                with suppress(OSError):  # removed, or of another user
                    path.unlink()

    def _files(self) -> Iterator[Path]:
        with suppress(OSError):
            yield from self._folder.iterdir()

    def _used_by(self, pids: Iterable[int]) -> set[Path]:
        """Return the files in the folder that some processes have open or mapped, as far as this user can see."""
        return {path for pid in pids for path in _open_files(pid) if path.is_relative_to(self._folder)}


def _open_files(pid: int) -> Iterator[Path]:
    with suppress(OSError):  # it has ended, or belongs to another user
        for line in Path(f"/proc/{pid}/maps").read_bytes().splitlines():
            name = line.split(maxsplit=5)[5:]
            if name and name[0].startswith(b"/"):
                yield Path(os.fsdecode(name[0]))
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                yield link.readlink()
