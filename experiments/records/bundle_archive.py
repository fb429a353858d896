"""Read a bundle from a tar file that anybody may have made: bounded before it is expanded, and plain files only."""

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from experiments.errors import BundleError, SpecProblem

MAX_BUNDLE_BYTES = 268_435_456
"""Of all files of a bundle together: text that is held in memory."""
MAX_BUNDLE_FILES = 50_000
_MAX_FRAMING = 2048
"""Bytes of a tar file for each member besides its content: header, padding, a long name."""
_GZIP = b"\x1f\x8b"
_BROKEN = (tarfile.TarError, EOFError, OSError, zlib.error, ValueError, OverflowError)
"""What the standard library raises for archives that are cut, mixed up or made to mislead."""


def refused(where: str, detail: str) -> BundleError:
    """Return the error about one file of a bundle."""
    return BundleError([SpecProblem(pointer=where, detail=detail)])


class BundleSize:
    """What was read of a bundle so far. Raises BundleError when it becomes too much, before it is read."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._bytes = 0
        self._files = 0

    def add(self, size: int) -> None:
        """Count one file of `size` bytes."""
        self._bytes += size
        self._files += 1
        if self._bytes > MAX_BUNDLE_BYTES:
            raise _too_large(self._where)
        if self._files > MAX_BUNDLE_FILES:
            raise refused(self._where, f"holds more than the {MAX_BUNDLE_FILES} files allowed")


def _too_large(where: str) -> BundleError:
    return refused(where, f"holds more than the {MAX_BUNDLE_BYTES} bytes allowed")


class _BoundedStream:
    """A stream that ends with an error before it has given too much; headers and holes count like content."""

    def __init__(self, source: IO[bytes], where: str) -> None:
        self._source = source
        self._where = where
        self._left = MAX_BUNDLE_BYTES + MAX_BUNDLE_FILES * _MAX_FRAMING

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes."""
        data = self._source.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise _too_large(self._where)
        return data


def read_tar(path: Path) -> dict[str, bytes]:
    """Return the plain files of a tar file by their names in it. Raises BundleError."""
    where = str(path)
    found: dict[str, bytes] = {}
    try:
        with _opened(path) as source, _stream_of(_BoundedStream(source, where)) as archive:
            size = BundleSize(where)
            for member in archive:
                if member.isdir():
                    continue
                _check(member, found)
                size.add(member.size)
                content = archive.extractfile(member)
                found[member.name] = b"" if content is None else content.read()
    except BundleError:
        raise
    except _BROKEN as error:
        raise refused(where, f"is not a tar file: {error}") from error
    return found


def _stream_of(source: _BoundedStream) -> tarfile.TarFile:
    return tarfile.open(fileobj=source, mode="r|")  # type: ignore[call-overload,no-any-return]  # it only reads


def _check(member: tarfile.TarInfo, found: dict[str, bytes]) -> None:
    if not member.isfile() or member.issparse() or member.size < 0:
        raise refused(member.name, "is no plain file")
    if member.name in found:
        raise refused(member.name, "is in the archive twice")


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    with path.open("rb") as raw:
        is_compressed = raw.read(len(_GZIP)) == _GZIP
        raw.seek(0)
        if not is_compressed:
            yield raw
            return
        with gzip.GzipFile(fileobj=raw) as expanded:
            yield expanded  # type: ignore[misc]  # it has the `read` that is needed
