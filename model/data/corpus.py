"""Source text on disk: the files of a corpus, their order and their split. Torch-free.

The order is a fixed shuffle (by a hash of the relative path), so a size cap takes a fair sample of the tree instead of
its first folders. The listing omits hidden files and folders, links and empty files. Every other file must be text in
UTF-8, and every folder readable. One file is one document.

A corpus is identified by the content of its files. Names, sizes and times may stay while the content changes.
"""

import hashlib
import importlib.util
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ablate.model.config import DataConfig
from ablate.model.errors import DataError

TORCH_HEADERS = "torch-headers"
"""Name of the default corpus: the C++ headers in the installed torch package."""
BUILT_IN = {TORCH_HEADERS: ("include", ""), "torch-python": ("", ".py")}
"""Corpora in the installed torch package: folder below it, and the end of the names of their files."""
NAMED = ", ".join(f"'{name}'" for name in BUILT_IN)

_HASH_RANGE = float(2**64)

_NAMED_FILES = 3
"""Unusable files that an error names; it counts the rest."""

_LOOKED_AT_BYTES = 4096
"""Part of a file that shows which kind of text or data it is."""

_SIGNATURES = {
    b"\x1f\x8b": "gzip data",
    b"\x28\xb5\x2f\xfd": "Zstandard data",
    b"\xfd7zXZ\x00": "xz data",
    b"BZh": "bzip2 data",
    b"\x04\x22\x4d\x18": "LZ4 data",
    b"PK\x03\x04": "a ZIP archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x89HDF": "an HDF5 file",
    b"\x93NUMPY": "a NumPy array",
    b"SQLite format 3": "an SQLite database",
    b"%PDF-": "a PDF file",
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"\x7fELF": "a program",
    b"\xff\xfe\x00\x00": "text in UTF-32",
    b"\x00\x00\xfe\xff": "text in UTF-32",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
}
"""First bytes of a file that is no UTF-8 text -> what it looks like; the first match counts."""


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of the corpus."""

    path: Path
    relative: str
    """POSIX path below the corpus root, which alone decides order and side."""
    size_bytes: int
    sha256: str = ""
    """Of the content when the corpus was split, in hex."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """The training and validation files of a corpus, both in shuffled order."""

    train: tuple[SourceFile, ...]
    val: tuple[SourceFile, ...]

    @property
    def content_digest(self) -> str:
        """SHA-256 of names, contents and sides."""
        lines = [
            f"{side}\0{file.relative}\0{file.sha256}"
            for side, files in (("train", self.train), ("val", self.val))
            for file in files
        ]
        return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def corpus_root(corpus: str) -> Path:
    """Return the folder of a corpus name or absolute path. Raises DataError if there is none."""
    if corpus in BUILT_IN:
        spec = importlib.util.find_spec("torch")
        if spec is None or not spec.submodule_search_locations:
            raise DataError(f"corpus '{corpus}' needs the torch package, which is not installed here")
        root = Path(spec.submodule_search_locations[0]) / BUILT_IN[corpus][0]
    else:
        root = Path(corpus)
        if not root.is_absolute():
            raise DataError(f"corpus is {corpus!r}; allowed: {NAMED} or an absolute folder path")
    try:
        problem = None if stat.S_ISDIR(root.stat().st_mode) else "it is a file"
    except OSError as error:
        problem = error.strerror
    if problem is not None:
        raise DataError(
            f"corpus {corpus!r}: {root} is not a folder that can be read ({problem}); "
            f"allowed: {NAMED} or an existing folder"
        )
    return root


def split_corpus(config: DataConfig) -> Split:
    """List the corpus up to `max_corpus_mib`, read every file for its digest, and split the corpus by file.

    Raises DataError if a side would be empty, or if a file or folder cannot be read.
    """
    root = corpus_root(config.corpus)
    budget_bytes = int(config.max_corpus_mib * 2**20)
    files = _within(
        sorted(_walk(root, BUILT_IN.get(config.corpus, ("", ""))[1]), key=lambda file: _rank("order", file.relative)),
        budget_bytes,
    )
    if len(files) < 2:
        raise DataError(
            f"corpus {config.corpus!r} has {len(files)} usable files within {config.max_corpus_mib} MiB in {root}; "
            f"allowed: at least 2 regular, non-empty, non-hidden files (one to train on, one to validate on)"
        )
    held_out = _held_out(files, config.val_fraction)
    files = [_with_digest(file) for file in files]
    return Split(
        train=tuple(file for file in files if file.relative not in held_out),
        val=tuple(file for file in files if file.relative in held_out),
    )


def check_texts(files: Sequence[SourceFile]) -> None:
    """Raise DataError, which names files and kinds, unless every file is text in UTF-8."""
    problems = []
    for file in files:
        kind = _other_kind(_read(file))
        if kind is not None:
            problems.append(f"{file.path} looks like {kind}")
    if problems:
        more = f"; and {len(problems) - _NAMED_FILES} more" if len(problems) > _NAMED_FILES else ""
        raise DataError(
            f"{len(problems)} of {len(files)} corpus files are not text in UTF-8: "
            f"{'; '.join(problems[:_NAMED_FILES])}{more}; allowed: text in UTF-8, so convert, unpack or remove other "
            f"files, or hide them by a name that begins with a dot"
        )


def read_documents(files: Sequence[SourceFile]) -> Iterator[str]:
    """Yield each file's text in order. Raises DataError for a file that changed, is unreadable or not UTF-8."""
    for file in files:
        content = _read(file)
        try:
            yield content.decode("utf-8")
        except UnicodeDecodeError:
            raise DataError(f"corpus file {file.path} looks like {_other_kind(content)}; allowed: UTF-8") from None


def _other_kind(content: bytes) -> str | None:
    """Return what a file looks like that is not text in UTF-8, None if it is."""
    try:
        content.decode("utf-8")
        problem = "binary data" if b"\0" in content else None
    except UnicodeDecodeError as error:
        problem = f"text in another encoding, such as Latin-1: byte {error.start} is 0x{content[error.start]:02x}"
    if problem is None:
        return None
    start = content[:_LOOKED_AT_BYTES]
    signed = next((kind for first, kind in _SIGNATURES.items() if start.startswith(first)), None)
    return signed or _wide_encoding(start) or ("binary data" if _has_controls(start) else problem)


def _wide_encoding(start: bytes) -> str | None:
    """Return UTF-16 or UTF-32 if most characters have the zero bytes of Latin letters in that encoding."""
    zeros = [start[place::4].count(0) / max(1, len(start[place::4])) for place in range(4)]
    often = [share > 0.5 for share in zeros]
    if often in ([False, True, True, True], [True, True, True, False]):
        return "text in UTF-32"
    return "text in UTF-16" if often in ([False, True] * 2, [True, False] * 2) else None


def _has_controls(start: bytes) -> bool:
    """Return whether bytes occur that no text has in any encoding of one byte per character."""
    return any(byte < 0x20 and byte not in b"\t\n\v\f\r\x1b" for byte in start)


def _read(file: SourceFile) -> bytes:
    """Return the content of a file. Raises DataError if it is not the content that the split saw."""
    try:
        content = file.path.read_bytes()
    except OSError as error:
        raise _unreadable("file", file.path, error) from error
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise DataError(f"corpus file {file.path} changed while the data was prepared; allowed: files that stay as is")
    return content


def _with_digest(file: SourceFile) -> SourceFile:
    try:
        with file.path.open("rb") as stream:
            return replace(file, sha256=hashlib.file_digest(stream, "sha256").hexdigest())
    except OSError as error:
        raise _unreadable("file", file.path, error) from error


def _unreadable(what: str, path: str | Path, error: OSError) -> DataError:
    return DataError(f"corpus {what} {path} cannot be read: {error.strerror}; allowed: readable files and folders")


def _walk(root: Path, name_end: str) -> Iterator[SourceFile]:
    for folder, folders, names in os.walk(root, onerror=_stop):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            path = Path(folder, name)
            try:
                status = path.lstat()
            except OSError as error:
                raise _unreadable("file", path, error) from error
            wanted = name.endswith(name_end) and not name.startswith(".")
            if stat.S_ISREG(status.st_mode) and status.st_size and wanted:
                yield SourceFile(path=path, relative=path.relative_to(root).as_posix(), size_bytes=status.st_size)


def _stop(error: OSError) -> None:
    """Raise the error of a folder, which os.walk would ignore."""
    raise _unreadable("folder", error.filename, error) from error


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
