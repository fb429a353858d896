"""Archives of code: packed where people work, named by the digest of their bytes, unpacked on nodes.

Equal files give equal bytes with one version of zlib. The digest of a tree depends on names and contents only, so it
is the same for a folder, its archive and the unpacked copy.
"""

import gzip
import hashlib
import io
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
import weakref
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO

from experiments.errors import CodeArchiveError

MOST_FILES = 20_000
"""Most files and links of a tree, and most folders."""
MOST_BYTES = 64 * 2**20
"""Most bytes of all files of a tree, and most bytes of its archive."""
PIECE_BYTES = 2**20
"""Bytes that are read, sent and stored at once."""
LEFT_OUT = frozenset({".git", ".hg", ".svn", ".venv", "venv", "node_modules", "__pycache__", ".ablate"})
"""Folders that never belong to a program's code."""
_ENVIRONMENT = "pyvenv.cfg"
"""File that marks a virtual environment of any name, which does not belong to it either."""
_MOST_NAME, _MOST_PART = 1000, 255
"""Most bytes of the path of a file, and of each name in it."""
_FRAMING = 4096
"""Most bytes of a member of an archive besides its content: headers, a long name, padding."""
_MOST_NAMES = 10 * MOST_FILES
"""Most files that are looked at to say what is too much; somebody may name a home by mistake."""
_MTIME = 315_532_800
"""1980-01-01, the time of every file of an archive; formats such as zip know no earlier one."""
_GIT_S = 60.0
_SHOWN = 5
"""Most names in an error."""
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


def pack_code(folder: Path) -> PackedCode:
    """Pack the files below `folder`. Raises CodeArchiveError for other things than files, or too many of them.

    Of a git work tree these are the files that git does not ignore; elsewhere all but version control, environments
    and caches.
    """
    if not folder.is_dir():
        raise CodeArchiveError(f"{str(folder)!r} is no folder")
    try:
        return _pack(folder, _names_of(folder))
    except OSError as error:
        raise CodeArchiveError(f"{str(folder)!r} cannot be packed: {error}") from error


def pack_commit(folder: Path, commit: str) -> PackedCode:
    """Pack the files of a commit of the repository around `folder`, below that folder. Raises CodeArchiveError.

    `commit` may be any revision that git reads, such as a branch.
    """
    if not folder.is_dir() or not _is_work_tree(folder):
        raise CodeArchiveError(f"{str(folder)!r} is in no git work tree, so it has no commit {commit}")
    try:
        names = _git(folder, "rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}", separator="\n")
    except CodeArchiveError as error:
        raise CodeArchiveError(f"the repository around {str(folder)!r} has no commit {commit!r}") from error
    whole = next(names)
    with tempfile.TemporaryDirectory(prefix="ablate-commit-") as place:
        archive, files = Path(place, "code.tar"), Path(place, "code")
        list(_git(folder, "archive", "--output", str(archive), whole))
        with tarfile.open(archive) as tar:
            if sum(member.size for member in tar) > MOST_BYTES:
                raise CodeArchiveError(f"commit {commit} has more than {code_limit()}")
            try:
                tar.extractall(files, filter="data")
            except tarfile.FilterError as error:
                raise CodeArchiveError(f"commit {commit} cannot be packed: {error}") from error
        return _pack(files, (str(path.relative_to(files)) for path in code_files(files)), commit=whole)


def _pack(folder: Path, files: Iterator[str], *, commit: str | None = None) -> PackedCode:
    names = sorted(set(islice(files, _MOST_NAMES)), key=lambda name: PurePosixPath(name).parts)
    _check_tree(folder, names)
    file = tempfile.TemporaryFile()  # noqa: SIM115  # PackedCode closes it
    try:
        hashing, tree = _write(file, folder, names)
        if hashing.size > MOST_BYTES:
            raise CodeArchiveError(f"{str(folder)!r} has {hashing.size:,} bytes when packed; allowed: {MOST_BYTES:,}")
    except (CodeArchiveError, OSError):
        file.close()
        raise
    return PackedCode(digest=hashing.digest, tree=tree, size=hashing.size, files=len(names), file=file, commit=commit)


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
    path = folder / name
    member = tarfile.TarInfo(name)
    member.mtime = _MTIME
    if path.is_symlink():
        member.type, member.linkname = tarfile.SYMTYPE, link_target(path)
        tar.addfile(member)
        return _line(name, "link", os.fsencode(member.linkname))
    content = path.read_bytes()
    program = bool(path.stat().st_mode & stat.S_IXUSR)
    member.size, member.mode = len(content), 0o755 if program else 0o644
    tar.addfile(member, io.BytesIO(content))
    return _line(name, "program" if program else "file", content)


def _line(name: str, kind: str, content: bytes) -> bytes:
    return f"{os.fsencode(name).hex()} {kind} {hashlib.sha256(content).hexdigest()}\n".encode()


def tree_digest(folder: Path) -> str:
    """Return the digest over names, kinds and contents of all files and links below a folder."""
    whole = hashlib.sha256()
    for path in code_files(folder):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            whole.update(_line(name, "link", os.fsencode(link_target(path))))
        else:
            kind = "program" if path.stat().st_mode & stat.S_IXUSR else "file"
            whole.update(_line(name, kind, path.read_bytes()))
    return f"sha256:{whole.hexdigest()}"


def code_files(folder: Path) -> Iterator[Path]:
    """Yield what a program's code has below a folder, sorted: files, links, and things that cannot be packed.

    Version control, environments and caches are left out.
    """
    entries = sorted(os.scandir(folder), key=lambda one: one.name)
    for entry in entries:
        path = Path(entry.path)
        if not entry.is_dir(follow_symlinks=False):
            yield path
        elif _belongs(path):
            yield from code_files(path)


def _belongs(folder: Path) -> bool:
    """Return whether a folder belongs to a program's code: it is neither version control, environment nor cache."""
    return folder.name not in LEFT_OUT and not (folder / _ENVIRONMENT).is_file()


def _names_of(folder: Path) -> Iterator[str]:
    """Yield the paths of the files to pack, relative to `folder`."""
    if not _is_work_tree(folder):
        yield from (str(path.relative_to(folder)) for path in code_files(folder))
        return
    found = False
    for name in _git(folder, "ls-files", "--cached", "--others", "--exclude-standard", "-z"):
        path = folder / name.rstrip("/")
        if not os.path.lexists(path) or _is_left_out(folder, name):  # deleted, but not yet for git
            continue
        found = True
        if path.is_dir() and not path.is_symlink():  # a submodule, or a repository inside
            if _belongs(path):
                yield from (f"{name.rstrip('/')}/{inner}" for inner in _names_of(path))
        else:
            yield name
    if not found and any(True for _ in code_files(folder)):
        raise CodeArchiveError(f"git ignores all files below {str(folder)!r}; copy them out of the repository")


def _is_left_out(folder: Path, name: str) -> bool:
    """Return whether a file lies in an environment or a cache, or is reached through a link only."""
    above = [folder / parent for parent in _above(name.rstrip("/"))]
    return any(parent.is_symlink() or not _belongs(parent) for parent in above)


def _above(name: str) -> list[str]:
    """Return the folders above a relative path, the nearest first."""
    return [str(parent) for parent in PurePosixPath(name).parents][:-1]


def _is_work_tree(folder: Path) -> bool:
    above = [folder.resolve(), *folder.resolve().parents]
    if not any(os.path.lexists(one / ".git") for one in above):
        return False
    return next(_git(folder, "rev-parse", "--is-inside-work-tree", separator="\n")) == "true"


def _git(folder: Path, *arguments: str, separator: str = "\0") -> Iterator[str]:
    if shutil.which("git") is None:
        raise CodeArchiveError(f"{str(folder)!r} is in a git work tree, but git is not installed here")
    without = ("env", "-u", "GIT_DIR", "-u", "GIT_WORK_TREE", "-u", "GIT_INDEX_FILE")  # a hook's: of its repository
    command = [*without, "git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, check=True, capture_output=True, timeout=_GIT_S)
    except subprocess.TimeoutExpired as error:
        raise CodeArchiveError(f"git did not list the files of {str(folder)!r} within {_GIT_S:.0f} s") from error
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace").strip()[-300:]
        raise CodeArchiveError(f"git cannot read {str(folder)!r}: {reason}") from error
    return iter([part for part in os.fsdecode(done.stdout).split(separator) if part])


def _check_tree(folder: Path, names: Sequence[str]) -> None:
    """Raise CodeArchiveError for a tree that no node would unpack."""
    if not names:
        raise CodeArchiveError(f"{str(folder)!r} has no files")
    kinds = {name: folder.joinpath(name).lstat() for name in names}
    _check_size(folder, {name: status.st_size for name, status in kinds.items()})
    for name, status in kinds.items():
        problem = name_problem(name)
        if problem is not None:
            raise CodeArchiveError(f"the file {name!r} {problem}")
        if stat.S_ISLNK(status.st_mode):
            check_link(folder / name, folder)
        elif not stat.S_ISREG(status.st_mode):
            raise CodeArchiveError(f"{name!r} is a pipe, a socket or a device; remove it, or let git ignore it")


def _check_size(folder: Path, sizes: Mapping[str, int]) -> None:
    """Raise CodeArchiveError for too many files, folders or bytes, with the names of most of them."""
    where = f"code {str(folder)!r} has"
    folders_above = {above for name in sizes for above in _above(name)}
    if len(folders_above) > MOST_FILES:
        raise CodeArchiveError(f"{where} {len(folders_above):,} folders; allowed: {MOST_FILES:,}")
    if len(sizes) > MOST_FILES:
        number = f"{len(sizes):,}{' or more' * (len(sizes) == _MOST_NAMES)}"
        folders = Counter(name.partition("/")[0] for name in sizes).most_common(_SHOWN)
        most = ", ".join(f"{name!r} {count:,}" for name, count in folders)
        raise CodeArchiveError(f"{where} {number} files; allowed: {code_limit()}; most are in {most}")
    total = sum(sizes.values())
    if total > MOST_BYTES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:_SHOWN]
        most = ", ".join(f"{name!r} {sizes[name]:,}" for name in largest)
        raise CodeArchiveError(f"{where} {total:,} bytes; allowed: {code_limit()}; the largest files: {most}")


def code_limit() -> str:
    """Return the limits of a program's code in words."""
    return f"{MOST_FILES:,} files and {MOST_BYTES // 2**20} MiB"


def name_problem(name: str) -> str | None:
    """Return why an archive may not have a file of this name; None if it may."""
    parts = name.split("/")
    if name.startswith("/") or any(part in {"", ".", ".."} for part in parts):
        return "has a name that is no plain path below the folder"
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in name):
        return "has a control character in its name"
    if len(os.fsencode(name)) > _MOST_NAME or any(len(os.fsencode(part)) > _MOST_PART for part in parts):
        return f"has too long a name; allowed: {_MOST_NAME} bytes, {_MOST_PART} between two slashes"
    return None


def link_target(path: Path) -> str:
    """Return the target of a link without detours such as `./`, which newer versions of Python drop from archives."""
    return os.path.normpath(path.readlink())


def check_link(path: Path, root: Path) -> None:
    """Raise CodeArchiveError for a link to another place than below `root`; absolute links name one place only."""
    target, place = link_target(path), os.path.realpath(path)
    if os.path.realpath(path.parent / target) != place:
        raise CodeArchiveError(f"the link {path.relative_to(root)} passes another link; name its target")
    if target.startswith("/") or not Path(place).is_relative_to(root.resolve()):
        raise CodeArchiveError(f"code has a link to another place: {path.relative_to(root)} -> {target}")


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
                tar.extract(member, target, filter="data")
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
        return None

    def _place_problem(self, member: tarfile.TarInfo) -> str | None:
        kind = "folder" if member.isdir() else "link" if member.issym() else "file"
        if any(self._kinds.setdefault(parent, "implied") in {"file", "link"} for parent in _above(member.name)):
            return "lies below a file or a link"
        earlier = self._kinds.get(member.name)
        if earlier is not None and (earlier, kind) != ("implied", "folder"):
            return "is in the archive twice"
        self._kinds[member.name] = kind
        return None


class _BoundedReader:
    """The expanded archive, which ends with an error before it is larger than any allowed one."""

    def __init__(self, source: gzip.GzipFile) -> None:
        self._source = source
        self._left = MOST_BYTES + MOST_FILES * _FRAMING

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes."""
        data = self._source.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise CodeArchiveError(f"the archive expands to more than {code_limit()}")
        return data
