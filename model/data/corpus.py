"""Source text on disk: the files of a corpus, their order and their split. Torch-free.

The order is a fixed shuffle (by a hash of the relative path), so a size cap takes a fair sample of the tree instead of
its first folders. The listing omits hidden files and folders, links and empty files. Reading skips files that are not
UTF-8. One file is one document.
"""

import hashlib
import importlib.util
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from model.config import DataConfig
from model.errors import DataError

TORCH_HEADERS = "torch-headers"
"""Name of the default corpus: the C++ headers in the installed torch package."""

_HASH_RANGE = float(2**64)


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of the corpus."""

    path: Path
    relative: str
    """POSIX path below the corpus root, which alone decides order and side."""
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, kw_only=True)
class Split:
    """The training and validation files of a corpus, both in shuffled order."""

    train: tuple[SourceFile, ...]
    val: tuple[SourceFile, ...]

    @property
    def listing_digest(self) -> str:
        """SHA-256 of names, sizes, times and sides, which changes with every file and needs no reading."""
        lines = [
            f"{side}\0{file.relative}\0{file.size_bytes}\0{file.mtime_ns}"
            for side, files in (("train", self.train), ("val", self.val))
            for file in files
        ]
        return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def corpus_root(corpus: str) -> Path:
    """Return the folder of a corpus name or absolute path. Raises DataError if there is none."""
    if corpus == TORCH_HEADERS:
        spec = importlib.util.find_spec("torch")
        if spec is None or not spec.submodule_search_locations:
            raise DataError(f"corpus '{TORCH_HEADERS}' needs the torch package, which is not installed here")
        root = Path(spec.submodule_search_locations[0]) / "include"
    else:
        root = Path(corpus)
        if not root.is_absolute():
            raise DataError(f"corpus is {corpus!r}; allowed: '{TORCH_HEADERS}' or an absolute folder path")
    if not root.is_dir():
        raise DataError(f"corpus {corpus!r}: {root} is not a folder; allowed: '{TORCH_HEADERS}' or an existing folder")
    return root


def split_corpus(config: DataConfig) -> Split:
    """List the corpus up to `max_corpus_mib` and split it by file. Raises DataError if a side would be empty."""
    root = corpus_root(config.corpus)
    budget_bytes = int(config.max_corpus_mib * 2**20)
    files = _within(sorted(_walk(root), key=lambda file: _rank("order", file.relative)), budget_bytes)
    if len(files) < 2:
        raise DataError(
            f"corpus {config.corpus!r} has {len(files)} usable files within {config.max_corpus_mib} MiB in {root}; "
            f"allowed: at least 2 regular, non-empty, non-hidden files (one to train on, one to validate on)"
        )
    held_out = _held_out(files, config.val_fraction)
    return Split(
        train=tuple(file for file in files if file.relative not in held_out),
        val=tuple(file for file in files if file.relative in held_out),
    )


def read_documents(files: tuple[SourceFile, ...]) -> Iterator[str | None]:
    """Yield each file's text in order, None for a file that is not UTF-8. Raises DataError for an unreadable file."""
    for file in files:
        try:
            content = file.path.read_bytes()
        except OSError as error:
            raise DataError(f"corpus file {file.path} cannot be read: {error.strerror}") from error
        try:
            yield content.decode("utf-8")
        except UnicodeDecodeError:
            yield None


def _walk(root: Path) -> Iterator[SourceFile]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            path = Path(folder, name)
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_size and not name.startswith("."):
                relative = path.relative_to(root).as_posix()
                yield SourceFile(path=path, relative=relative, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)


def _within(files: list[SourceFile], budget_bytes: int) -> list[SourceFile]:
    """Return the whole files that fit in order; a file that does not fit is skipped."""
    fitting = []
    for file in files:
        if file.size_bytes <= budget_bytes:
            fitting.append(file)
            budget_bytes -= file.size_bytes
    return fitting


def _held_out(files: list[SourceFile], val_fraction: float) -> set[str]:
    """Return the validation files' paths: hashes below the fraction, at least one file and never all."""
    ranked = sorted((_rank("val", file.relative), file.relative) for file in files)
    below = [relative for rank, relative in ranked if rank < val_fraction]
    return set(below[: len(files) - 1] or [ranked[0][1]])


def _rank(purpose: str, relative: str) -> float:
    """Return a fixed pseudo-random number in [0, 1) for a path, independent for each purpose."""
    digest = hashlib.sha256(f"{purpose}\0{relative}".encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / _HASH_RANGE
