"""Files in /dev/shm of a trial that has no file tree of its own: they count as its files, and go when it ends.

Programs of the same user make files there, too. So a file is the trial's only if one of its processes was seen with it,
and it was not there when the trial began.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from experiments.runtime.own_tree import SHARED_MEMORY
from experiments.runtime.processes import process_numbers


class SharedMemory:
    """The files of one trial, in which `folder` has no others from now on."""

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
