"""Archives of code: packed where people work, named by the digest of their bytes, unpacked on nodes.

Equal files give equal bytes with one version of zlib. The digest of a tree depends on names and contents only, so it
is the same for a folder, its archive and the unpacked copy.
"""

import gzip
import hashlib
import io
import os
import re
import shutil
import stat
import tarfile
import tempfile
import weakref
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO

from ablate.experiments.digest import digest_bytes
from ablate.experiments.errors import CodeArchiveError
from ablate.experiments.records.code_tree import (
    MOST_BYTES,
    MOST_FILES,
    MOST_NAMES,
    belongs,
    check_link,
    check_tree,
    code_files,
    code_limit,
    folders_above,
    is_left_out,
    name_problem,
    read_file,
)
from ablate.experiments.records.commit_files import write_commit
from ablate.experiments.records.git_repository import is_work_tree, names_in, run_git

ASKED = "# Written by `ablate ask`"
"""Begin of the specs that `ablate ask` writes beside a program."""
PIECE_BYTES = 2**20
"""Bytes that are read, sent and stored at once."""
_FRAMING = 4096
"""Most bytes of a member of an archive besides its content: headers, a long name, padding."""
_MTIME = 315_532_800
"""1980-01-01, the time of every file of an archive; formats such as zip know no earlier one."""
_BROKEN = (
    *(tarfile.TarError, gzip.BadGzipFile, zlib.error),
    *(EOFError, ValueError, OverflowError, RecursionError, IndexError, KeyError, TypeError),
)
"""Errors of the standard library for truncated, corrupt or malicious archives."""


@dataclass(frozen=True, kw_only=True)
class PackedCode:
    """An archive in a temporary file without a name, which vanishes with this object."""

    digest: str
    """Of the archive's bytes."""
    tree: str
    """Digest of the tree."""
    size: int
    """Bytes of the archive."""
    files: int
    """Files and links in it."""
    file: BinaryIO
    commit: str | None = None
    """The whole name of the commit that was packed; None for a folder as it is."""

    def __post_init__(self) -> None:
        """Close the file with this object."""
        weakref.finalize(self, self.file.close)

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes from the beginning."""
        self.file.seek(0)
        while piece := self.file.read(PIECE_BYTES):
            yield piece

    def names(self) -> frozenset[str]:
        """Return the paths of its files and links."""
        self.file.seek(0)
        with tarfile.open(fileobj=self.file, mode="r:gz") as tar:
            return frozenset(tar.getnames())

    def file_digests(self) -> dict[str, str]:
        """Return the digest of each of its files by name, without links and empty files."""
        return file_digests(self.file)

    def mentions(self, pattern: re.Pattern[bytes]) -> bool:
        """Return whether a file other than Markdown and YAML has text of this pattern."""
        self.file.seek(0)
        with tarfile.open(fileobj=self.file, mode="r:gz") as tar:
            programs = (one for one in tar if one.isfile() and not one.name.endswith((".md", ".yaml", ".yml")))
            return any(pattern.search(content.read()) for one in programs if (content := tar.extractfile(one)))


def pack_code(folder: Path) -> PackedCode:
    """Pack the files below `folder`. Raises CodeArchiveError for other things than files, or too many of them.

    Of a git work tree these are the files that git does not ignore; elsewhere all but version control, environments
    and caches.
    """
    if not folder.is_dir():
        raise CodeArchiveError(f"{str(folder)!r} is no folder")
    try:
        return _pack(folder, _names_of(folder), f"code {str(folder)!r}")
    except OSError as error:
        raise CodeArchiveError(f"{str(folder)!r} cannot be packed: {error}") from error


def pack_commit(folder: Path, revision: str) -> PackedCode:
    """Pack the files of a commit of the repository around `folder`, below that folder. Raises CodeArchiveError.

    `revision` is any that git reads, such as a branch.
    """
    title = f"commit {revision} of {str(folder)!r}"
    try:
        with tempfile.TemporaryDirectory(prefix="ablate-commit-") as place:
            files = write_commit(folder, revision, Path(place, "code"))
            return _pack(Path(place, "code"), iter(files.names), title, commit=files.commit)
    except CodeArchiveError:
        raise
    except (OSError, ValueError) as error:
        raise CodeArchiveError(f"{title} cannot be packed: {error}") from error


def _pack(folder: Path, files: Iterator[str], title: str, *, commit: str | None = None) -> PackedCode:
    own = (name for name in files if not _is_asked(folder / name))
    names = sorted(set(islice(own, MOST_NAMES)), key=lambda name: PurePosixPath(name).parts)
    check_tree(folder, names, title)
    file = tempfile.TemporaryFile()  # noqa: SIM115  # PackedCode closes it
    try:
        hashing, tree = _write(file, folder, names)
        if hashing.size > MOST_BYTES:
            raise CodeArchiveError(f"{title} has {hashing.size:,} bytes when packed; allowed: {MOST_BYTES:,}")
    except (CodeArchiveError, OSError):
        file.close()
        raise
    return PackedCode(digest=hashing.digest, tree=tree, size=hashing.size, files=len(names), file=file, commit=commit)


def _is_asked(path: Path) -> bool:
    """Return whether a file is a spec of `ablate ask`, which would make the code of every question another one."""
    if not (path.name.startswith("ask-") and path.suffix == ".yaml" and path.is_file()):
        return False
    with path.open("rb") as file:
        return file.read(len(ASKED)) == ASKED.encode()


def _write(file: BinaryIO, folder: Path, names: Sequence[str]) -> tuple["_Hashing", str]:
    """Write the archive; return its digest and size, and the digest of the tree."""
    hashing, whole = _Hashing(file), hashlib.sha256()
    with (
        gzip.GzipFile(fileobj=hashing, mode="wb", filename="", mtime=0, compresslevel=6) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar,
    ):
        for name in names:
            whole.update(_add(tar, folder, name))
    return hashing, f"sha256:{whole.hexdigest()}"


class _Hashing:
    """A file that also hashes and counts what is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._whole = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self._whole.update(data)
        self.size += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    @property
    def digest(self) -> str:
        return f"sha256:{self._whole.hexdigest()}"


def _add(tar: tarfile.TarFile, folder: Path, name: str) -> bytes:
    """Add a file or a link to an archive; return its line of the tree's digest."""
    file = read_file(folder, name)
    member = tarfile.TarInfo(name)
    member.mtime = _MTIME
    if file.kind == "link":
        member.type, member.linkname = tarfile.SYMTYPE, os.fsdecode(file.content)
        tar.addfile(member)
    else:
        member.size, member.mode = len(file.content), 0o755 if file.kind == "program" else 0o644
        tar.addfile(member, io.BytesIO(file.content))
    return file.line


def _names_of(folder: Path) -> Iterator[str]:
    """Yield the paths of the files to pack, relative to `folder`."""
    if not is_work_tree(folder):
        yield from (str(path.relative_to(folder)) for path in code_files(folder))
        return
    empty = True
    for name in names_in(run_git(folder, "ls-files", "--cached", "--others", "--exclude-standard", "-z")):
        path = folder / name.rstrip("/")
        if not os.path.lexists(path) or is_left_out(folder, name):  # deleted, but not yet for git
            continue
        empty = False
        if path.is_dir() and not path.is_symlink():  # a submodule, or a repository inside
            if belongs(path) and os.path.lexists(path / ".git"):
                yield from (f"{name.rstrip('/')}/{inner}" for inner in _names_of(path))
        else:
            yield name
    if empty and any(True for _ in code_files(folder)):
        raise CodeArchiveError(f"git ignores all files below {str(folder)!r}", "copy them out of the repository")


def unpack_code(archive: Path, target: Path) -> None:
    """Unpack an archive into the new folder `target`. Raises CodeArchiveError for any but what `pack_code` can make.

    No name is taken twice, no file lies below a link or a file, and no link leaves the folder. Neither a file nor the
    expanded archive grows beyond the limits.
    """
    target.mkdir()
    members = _Members()
    try:
        with (
            archive.open("rb") as raw,
            gzip.GzipFile(fileobj=raw) as expanded,
            tarfile.open(fileobj=_BoundedReader(expanded), mode="r|") as tar,  # type: ignore[call-overload]  # it only reads
        ):
            for member in tar:
                members.take(member)
                _extract(tar, member, target / member.name)
    except CodeArchiveError:
        raise
    except _BROKEN as error:
        raise CodeArchiveError(f"the archive cannot be unpacked: {type(error).__name__}: {error}") from error
    unpacked = [path for path in _everything(target) if path.is_symlink() or not path.is_dir()]
    if len(unpacked) != members.files:
        raise CodeArchiveError("names in the archive are one file on this file system; rename one of them")
    for path in unpacked:
        if path.is_symlink():
            check_link(path, target)


def read_files(archive: bytes, *, most_bytes: int) -> dict[str, bytes]:
    """Return the files of an archive by name, links as their targets, without writing any.

    Raises CodeArchiveError for any but what `pack_code` can make, and for one that expands to more than `most_bytes`.
    """
    files = _files_in(io.BytesIO(archive), most_bytes)
    return {one.name: f"link to {one.linkname}".encode() if text is None else text for one, text in files}


def file_digests(archive: BinaryIO) -> dict[str, str]:
    """Return the digest of each file of an archive by name, without links and empty files. Raises CodeArchiveError."""
    archive.seek(0)
    return {one.name: digest_bytes(content) for one, content in _files_in(archive) if content}


def _files_in(archive: BinaryIO, most_bytes: int | None = None) -> Iterator[tuple[tarfile.TarInfo, bytes | None]]:
    """Yield the files of an archive with their content, and its links with None."""
    members = _Members()
    try:
        with (
            gzip.GzipFile(fileobj=archive) as expanded,
            tarfile.open(fileobj=_BoundedReader(expanded, most_bytes), mode="r|") as tar,  # type: ignore[call-overload]  # it only reads
        ):
            for member in tar:
                members.take(member)
                content = tar.extractfile(member) if member.isreg() else None
                if not member.isdir():
                    yield member, None if content is None else content.read()
    except _BROKEN as error:
        raise CodeArchiveError(f"the archive cannot be read: {type(error).__name__}: {error}") from error


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    """Write a checked member as a new entry; nothing of its header counts but name, kind, target and executable bit."""
    folder = path if member.isdir() else path.parent
    folder.mkdir(parents=True, exist_ok=True)
    if member.issym():
        path.symlink_to(member.linkname)
    elif (content := tar.extractfile(member)) is not None:
        with path.open("xb") as file:
            shutil.copyfileobj(content, file)
        path.chmod(0o755 if member.mode & stat.S_IXUSR else 0o644)


def _everything(folder: Path) -> Iterator[Path]:
    for entry in os.scandir(folder):
        yield Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            yield from _everything(Path(entry.path))


class _Members:
    """The members of an archive so far. Each one is checked before it is unpacked."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._bytes = 0
        self.files = 0
        """Files and links."""

    def take(self, member: tarfile.TarInfo) -> None:
        """Note one member. Raises CodeArchiveError if it may not be in an archive."""
        problem = name_problem(member.name) or self._kind_problem(member) or self._place_problem(member)
        if problem is not None:
            raise CodeArchiveError(f"the archive's member {member.name[:200]!r} {problem}")
        self._bytes += member.size
        self.files += not member.isdir()
        if max(self.files, len(self._kinds) - self.files) > MOST_FILES or self._bytes > MOST_BYTES:
            raise CodeArchiveError(f"the archive has more than {code_limit()}")

    def _kind_problem(self, member: tarfile.TarInfo) -> str | None:
        if member.issparse() or not (member.isdir() or member.issym() or member.isreg()):
            return "is no plain file, folder or symbolic link"
        if member.size < 0 or (member.size and not member.isreg()):
            return f"has a size of {member.size} bytes"
        if member.issym() and _leaves(member):
            return f"is a link to another place: {member.linkname[:200]!r}"
        return None

    def _place_problem(self, member: tarfile.TarInfo) -> str | None:
        kind = "folder" if member.isdir() else "link" if member.issym() else "file"
        if any(self._kinds.setdefault(parent, "implied") in {"file", "link"} for parent in folders_above(member.name)):
            return "lies below a file or a link"
        earlier = self._kinds.get(member.name)
        if earlier is not None and (earlier, kind) != ("implied", "folder"):
            return "is in the archive twice"
        self._kinds[member.name] = kind
        return None


def _leaves(link: tarfile.TarInfo) -> bool:
    """Return whether a link leads out of the archive by its text alone."""
    place = os.path.normpath(os.path.join(os.path.dirname(link.name), link.linkname))  # noqa: PTH118, PTH120 - no Path
    return not link.linkname or "\0" in link.linkname or place.startswith("/") or place.split("/")[0] == ".."


class _BoundedReader:
    """The expanded archive, which ends with an error before it is larger than any allowed one."""

    def __init__(self, source: gzip.GzipFile, most_bytes: int | None = None) -> None:
        self._source = source
        self._limit = code_limit() if most_bytes is None else f"{most_bytes:,} bytes"
        self._left = MOST_BYTES + MOST_FILES * _FRAMING if most_bytes is None else most_bytes

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes."""
        data = self._source.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise CodeArchiveError(f"the archive expands to more than {self._limit}")
        return data
