"""A small file system of its own that can be made full, where this system lets us mount one."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SIZE = "768m"
_TRIES = 5


class SmallDisk:
    """A folder on a file system in memory; an ordinary folder where nothing may be mounted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.mounted = _run("mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=755", "ablate-chaos", str(folder))

    @contextmanager
    def full(self) -> Iterator[bool]:
        """Leave no free byte; yields whether that worked."""
        yield self.mounted and any(self._resize(str(self._used())) for _ in range(_TRIES))
        self._resize(SIZE)

    def close(self) -> None:
        """Give the memory back."""
        if self.mounted:
            _run("umount", "--lazy", str(self.folder))
        with suppress(OSError):
            self.folder.rmdir()

    def _used(self) -> int:
        state = os.statvfs(self.folder)
        return max(4096, (state.f_blocks - state.f_bfree) * state.f_frsize)

    def _resize(self, size: str) -> bool:
        return self.mounted and _run("mount", "-o", f"remount,size={size}", str(self.folder))


def _run(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
