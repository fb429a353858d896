"""A program's code as a tree of files: what belongs to it, its limits, and its digest.

The digest depends on names, kinds and contents only, so it is the same for a folder, its archive and any copy.
"""

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ablate.experiments.errors import CodeArchiveError

MOST_FILES = 20_000
"""Most files and links of a tree, and most folders."""
MOST_BYTES = 64 * 2**20
"""Most bytes of all files of a tree, and most bytes of its archive."""
LEFT_OUT = frozenset({".git", ".hg", ".svn", ".venv", "venv", "node_modules", "__pycache__", ".ablate"})
"""Folders that never belong to a program's code."""
_ENVIRONMENT = "pyvenv.cfg"
"""File that marks a virtual environment of any name, which does not belong to it either."""
_MOST_NAME, _MOST_PART = 1000, 255
"""Most bytes of the path of a file, and of each name in it."""
MOST_NAMES = 10 * MOST_FILES
"""Most files that are looked at to say what is too much; somebody may name a home by mistake."""
_SHOWN = 5
"""Most names in an error."""


@dataclass(frozen=True, kw_only=True)
class CodeFile:
    """A file or a link of a program's code."""

    name: str
    """Path below the folder."""
    kind: str
    """`file`, `program` or `link`."""
    content: bytes
    """A link's content is its target."""

    @property
    def line(self) -> bytes:
        """The file's part of the digest of its tree."""
        return f"{os.fsencode(self.name).hex()} {self.kind} {hashlib.sha256(self.content).hexdigest()}\n".encode()


def read_file(folder: Path, name: str) -> CodeFile:
    """Return a file or a link below a folder."""
    path = folder / name
    if path.is_symlink():
        return CodeFile(name=name, kind="link", content=os.fsencode(link_target(path)))
    kind = "program" if path.stat().st_mode & stat.S_IXUSR else "file"
    return CodeFile(name=name, kind=kind, content=path.read_bytes())


def tree_digest(folder: Path) -> str:
    """Return the digest over names, kinds and contents of all files and links below a folder."""
    whole = hashlib.sha256()
    for path in code_files(folder):
        whole.update(read_file(folder, str(path.relative_to(folder))).line)
    return f"sha256:{whole.hexdigest()}"


def code_files(folder: Path) -> Iterator[Path]:
    """Yield what a program's code has below a folder, sorted: files, links, and things that cannot be packed.

    Version control, environments and caches are left out.
    """
    entries = sorted(os.scandir(folder), key=lambda one: one.name)
    for entry in entries:
        path = Path(entry.path)
        if not entry.is_dir(follow_symlinks=False):
            if entry.name != ".git":  # a file in linked work trees and in submodules
                yield path
        elif belongs(path):
            yield from code_files(path)


def belongs(folder: Path) -> bool:
    """Return whether a folder belongs to a program's code: it is neither version control, environment nor cache."""
    return folder.name not in LEFT_OUT and not (folder / _ENVIRONMENT).is_file()


def is_left_out(folder: Path, name: str) -> bool:
    """Return whether a file below a folder lies in an environment or a cache, or is reached through a link only."""
    above = [folder / parent for parent in folders_above(name.rstrip("/"))]
    return any(parent.is_symlink() or not belongs(parent) for parent in above)


def left_out_names(names: Collection[str]) -> set[str]:
    """Return those of the `names` of a tree's files that do not belong to a program's code."""
    environments = {name.removesuffix(f"/{_ENVIRONMENT}") for name in names if name.endswith(f"/{_ENVIRONMENT}")}
    return {
        name
        for name in names
        if any(above in environments or PurePosixPath(above).name in LEFT_OUT for above in folders_above(name))
    }


def folders_above(name: str) -> list[str]:
    """Return the folders above a relative path, the nearest first."""
    return [str(parent) for parent in PurePosixPath(name).parents][:-1]


def check_tree(folder: Path, names: Sequence[str], title: str) -> None:
    """Raise CodeArchiveError for a tree that no node would unpack; `title` names it."""
    if not names:
        raise CodeArchiveError(f"{title} has no files")
    kinds = {name: folder.joinpath(name).lstat() for name in names}
    check_size(title, {name: status.st_size for name, status in kinds.items()})
    for name, status in kinds.items():
        problem = name_problem(name)
        if problem is not None:
            raise CodeArchiveError(f"the file {name!r} {problem}")
        if stat.S_ISLNK(status.st_mode):
            check_link(folder / name, folder)
        elif not stat.S_ISREG(status.st_mode):
            raise CodeArchiveError(f"{name!r} is a pipe, a socket or a device; remove it, or let git ignore it")


def check_size(title: str, sizes: Mapping[str, int]) -> None:
    """Raise CodeArchiveError for too many files, folders or bytes, with the names of most of them."""
    where = f"{title} has"
    folders = {above for name in sizes for above in folders_above(name)}
    if len(folders) > MOST_FILES:
        raise CodeArchiveError(f"{where} {len(folders):,} folders; allowed: {MOST_FILES:,}")
    if len(sizes) > MOST_FILES:
        number = f"{len(sizes):,}{' or more' * (len(sizes) == MOST_NAMES)}"
        counts = Counter(name.partition("/")[0] for name in sizes).most_common(_SHOWN)
        most = ", ".join(f"{name!r} {count:,}" for name, count in counts)
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
