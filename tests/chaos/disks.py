"""Small disks that can be full, and that can lose power: then they keep what was synced and drop the rest.

A disk is an ext4 file system in an image in memory. The kernel's own shutdown call stops it without writing anything
back. Mounted again, it replays its journal, as after a power failure. Not covered: a drive that lies about its cache,
and sectors that are written in part.
"""

import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.waiting import until

SIZE_MIB = 768
_TRIES = 5
_SHUTDOWN = 0x8004587D
"""FS_IOC_SHUTDOWN"""
_NOTHING_WRITTEN_BACK = struct.pack("I", 2)
_OPTIONS = "loop,commit=300"
"""The journal is written by fsync alone for 300 seconds, not every five."""


class SmallDisk:
    """A folder on a small file system, or an ordinary folder if mounting is not allowed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._memory = folder.with_name(f"{folder.name}.memory")
        self._memory.mkdir()
        self._image = self._memory / "image"
        self._number = 0
        self._filler = folder / "filler"
        limit = f"size={2 * SIZE_MIB}m"  # two while a copy is made, though most is empty
        self._has_memory = _run("mount", "-t", "tmpfs", "-o", limit, "ablate-chaos", str(self._memory))
        self.mounted = self._has_memory and self._made()

    def _made(self) -> bool:
        with self._image.open("wb") as image:
            image.truncate(SIZE_MIB * 2**20)
        lazy = "lazy_itable_init=0,lazy_journal_init=0"
        return _run("mkfs.ext4", "-q", "-m", "0", "-E", lazy, str(self._image)) and self._mount()

    def _mount(self) -> bool:
        return _run("mount", "-o", _OPTIONS, str(self._image), str(self.folder))

    @contextmanager
    def full(self) -> Iterator[bool]:
        """Fill the disk; yield whether that worked."""
        yield self.mounted and self._fill()
        self._filler.unlink(missing_ok=True)
        handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(handle)  # or the file would be back after a power loss
        os.close(handle)

    def _fill(self) -> bool:
        with self._filler.open("ab") as filler:
            for _ in range(_TRIES):
                state = os.statvfs(self.folder)
                with suppress(OSError):  # others write at the same time
                    os.posix_fallocate(filler.fileno(), filler.seek(0, os.SEEK_END), state.f_bavail * state.f_frsize)
        return os.statvfs(self.folder).f_bavail * os.statvfs(self.folder).f_frsize < 2**20

    def lose_power(self) -> None:
        """Drop everything that was not synced. The processes that use the disk must have ended. Raises OSError."""
        handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(handle, _SHUTDOWN, _NOTHING_WRITTEN_BACK)
        finally:
            os.close(handle)
        until(lambda: _run("umount", str(self.folder)), what=f"end of the use of {self.folder}")
        self._image = self._copied(self._image)
        if not self._mount():
            raise OSError(f"{self._image} cannot be mounted")

    def _copied(self, image: Path) -> Path:
        """Return a copy of an image, and drop the image.

        A mount namespace that any process made in the meantime keeps the stopped file system alive. The image would
        then be mounted as the same one, which is still stopped.
        """
        self._number += 1
        copy = self._memory / f"image-{self._number}"
        subprocess.run(["cp", "--sparse=always", str(image), str(copy)], check=True)
        image.unlink()
        return copy

    def close(self) -> None:
        """Free the memory."""
        for folder, is_mounted in ((self.folder, self.mounted), (self._memory, self._has_memory)):
            if is_mounted:
                _run("umount", "--lazy", str(folder))
            with suppress(OSError):
                folder.rmdir()


def _run(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
