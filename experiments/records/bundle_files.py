"""Bundles on disk: a folder, or a tar file from anybody, which is bounded before it is expanded.

Files are read into memory: a bundle holds text and no data sets.
"""

import gzip
import io
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from ablate.experiments.errors import BundleError, SpecProblem

MANIFEST, PLAN, BLOCK, RECEIPT, LOG = "manifest.json", "plan.json", "block.json", "receipt.json", "log.txt"
WORK = "work"
"""Folder of a running `ablate offline exec`; no part of the bundle."""

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")


def is_bundle(path: Path) -> bool:
    """Say whether `path` is a folder with a manifest, or has the name of a tar file."""
    return (path / MANIFEST).is_file() or (path.is_file() and path.name.endswith(TAR_SUFFIXES))


MAX_BUNDLE_BYTES = 268_435_456
"""Limit of all files of a bundle together, which are kept in memory."""
MAX_BUNDLE_FILES = 50_000
_MAX_FRAMING = 2048
"""Bytes of a tar member besides its content: header, padding, a long name."""
_GZIP = b"\x1f\x8b"
_BROKEN = (tarfile.TarError, EOFError, OSError, zlib.error, ValueError, OverflowError)
"""Errors of the standard library for truncated, corrupt or malicious archives."""


def refused(where: str, detail: str) -> BundleError:
    """Return the error about one file of a bundle."""
    return BundleError([SpecProblem(pointer=where, detail=detail)])


class BundleSize:
    """Size of a bundle so far; raises BundleError before too much is read."""

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
    """A stream that fails before it returns too much; headers and holes count like content."""

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
    """Return the plain files of a tar file by name. Raises BundleError."""
    try:
        with path.open("rb") as source:
            return read_tar_stream(source, str(path))
    except OSError as error:
        raise refused(str(path), f"is not a tar file: {error}") from error


def read_tar_stream(source: IO[bytes], where: str) -> dict[str, bytes]:
    """Return the plain files of a seekable tar archive, with or without gzip.

    Raises BundleError, which calls the archive `where`.
    """
    files: dict[str, bytes] = {}
    try:
        with _expanded(source) as expanded, _stream_of(_BoundedStream(expanded, where)) as archive:
            size = BundleSize(where)
            for member in archive:
                if member.isdir():
                    continue
                _check(member, files)
                size.add(member.size)
                content = archive.extractfile(member)
                files[member.name] = b"" if content is None else content.read()
    except BundleError:
        raise
    except _BROKEN as error:
        raise refused(where, f"is not a tar file: {error}") from error
    return files


def _stream_of(source: _BoundedStream) -> tarfile.TarFile:
    return tarfile.open(fileobj=source, mode="r|")  # type: ignore[call-overload,no-any-return]  # it only reads


def _check(member: tarfile.TarInfo, files: Mapping[str, bytes]) -> None:
    if not member.isfile() or member.issparse() or member.size < 0:
        raise refused(member.name, "is not a plain file")
    if member.name in files:
        raise refused(member.name, "is in the archive twice")


@contextmanager
def _expanded(raw: IO[bytes]) -> Iterator[IO[bytes]]:
    is_compressed = raw.read(len(_GZIP)) == _GZIP
    raw.seek(0)
    if not is_compressed:
        yield raw
        return
    with gzip.GzipFile(fileobj=raw) as expanded:
        yield expanded  # type: ignore[misc]  # it has the `read` that is needed


def read_bundle_files(path: Path) -> dict[str, bytes]:
    """Return the files of the bundle at `path` by path below it. Raises BundleError without a bundle."""
    if path.is_dir():
        return _read_folder(path)
    if path.is_file():
        return _read_tar(path)
    raise refused(str(path), "there is no such folder or tar file")


def write_tar(files: Mapping[str, bytes], path: Path) -> None:
    """Write the files into a tar file, below a folder of its name; equal files give equal bytes."""
    folder = path.name.removesuffix(".tar")
    part = path.with_name(path.name + ".part")
    with tarfile.open(part, "w") as archive:
        for name, data in sorted(files.items()):
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    part.replace(path)


def _read_folder(folder: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    size = BundleSize(str(folder))
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name.partition("/")[0] == WORK or (path.is_dir() and not path.is_symlink()):
            continue
        if path.is_symlink() or not path.is_file():
            raise refused(name, "is not a plain file")
        size.add(path.stat().st_size)
        files[name] = path.read_bytes()
    return files


def _read_tar(path: Path) -> dict[str, bytes]:
    files = read_tar(path)
    roots = [name for name in files if PurePosixPath(name).name == MANIFEST]
    if len(roots) != 1:
        raise refused(str(path), f"holds {len(roots)} manifests; a bundle has one")
    prefix = roots[0].removesuffix(MANIFEST)
    return {name.removeprefix(prefix): data for name, data in files.items()}
