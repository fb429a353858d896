"""The prepared dataset: tokenizer, packed rows and split, cached on disk with a digest. Torch-free.

The name of a cache folder depends on everything that decides its content, the contents of the corpus included. The
folder is built under a file lock in a temporary place and then renamed, so a folder with that name is complete.
Preparation checks sizes and contents, and builds a damaged folder again. A trial checks sizes, and contents up to
VERIFY_BYTES. The same corpus gives the same digest.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from ablate.model.config import DataConfig
from ablate.model.data.corpus import SourceFile, Split, check_texts, read_documents, split_corpus
from ablate.model.data.packing import Batch, PackedRows, mixed, row_paths, rows_at, write_rows
from ablate.model.data.tokenizer import VERSION as TOKENIZER_VERSION
from ablate.model.data.tokenizer import BpeTokenizer
from ablate.model.errors import DataError, DatasetDamaged

FORMAT_VERSION = 1
"""Part of the cache key. Raise it when the same tokens are stored differently."""

VERIFY_BYTES = 2**30
"""A trial hashes a dataset up to this size (about a second per GiB); preparation hashes all of every size."""

_ENCODE_CHARS = 4 * 2**20
_MANIFEST = "manifest.json"
_TOKENIZER = "tokenizer.json"
SECOND = "second"
"""Name of the training rows of a second corpus."""

Report = Callable[[str], None]


class Sources:
    """The files that a dataset is made of, and the sizes of its rows and vocabulary."""

    def __init__(self, config: DataConfig, vocab_size: int) -> None:
        self.first, *second = (split_corpus(replace(config, **_only(name))) for name in config.corpora)
        self.second: Split | None = second[0] if second else None
        self.seq_len, self.val_row, self.vocab_size = config.seq_len, config.val_row, vocab_size

    @property
    def key(self) -> str:
        """Text of everything that decides the dataset's content."""
        sizes = (self.seq_len, self.vocab_size, TOKENIZER_VERSION, tokenizers.__version__, FORMAT_VERSION)
        parts: list[Any] = [self.first.content_digest, *sizes]
        if self.val_row != self.seq_len:
            parts.append({"val_row": self.val_row})
        if self.second is not None:
            parts.append({"second": self.second.content_digest})
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]

    @property
    def sides(self) -> Iterator[tuple[str, Sequence[SourceFile], int]]:
        """Name, files and row length of each set of rows."""
        yield "train", self.first.train, self.seq_len
        if self.second is not None:
            yield SECOND, self.second.train, self.seq_len
        yield "val", self.first.val, self.val_row


def _only(corpus: str) -> dict[str, Any]:
    return {"corpus": corpus, "second_corpus": "", "second_share": 0.0}


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Packed rows of both sides of the split, ready for training."""

    digest: str
    """SHA-256 over tokenizer, rows and document ids. Equal digests mean equal data."""
    seq_len: int
    val_row: int
    """Tokens of a validation row."""
    vocab_size: int
    """Number of the tokenizer's tokens, above every token id."""
    val_digest: str
    """SHA-256 over tokenizer and validation rows: losses over equal ones can be compared."""
    train: PackedRows
    second: PackedRows | None
    """Training rows of the second corpus; None without one."""
    val: PackedRows
    folder: Path

    def batch(self, step: int, micro_batch: int, seed: int, *, second_share: float = 0.0) -> Batch:
        """Return the training batch of `step`, fixed by the seed. Rows repeat only after a whole epoch of their corpus.

        After n rows, floor(n * second_share) of them were of the second corpus.
        """
        places = np.arange(step * micro_batch, (step + 1) * micro_batch, dtype=np.int64)
        before = np.floor(places * second_share).astype(np.int64)
        chosen = np.floor((places + 1) * second_share).astype(np.int64) > before
        first = self.train.batch(rows_at((places - before)[~chosen], num_rows=len(self.train), seed=seed))
        if not chosen.any():
            return first
        if self.second is None:
            raise DataError(f"data.second_share is {second_share}; allowed: 0, because there is no second corpus")
        second = self.second.batch(rows_at(before[chosen], num_rows=len(self.second), seed=seed))
        return mixed(chosen, first, second)

    def val_batches(self, num_rows: int, micro_batch: int) -> Iterator[Batch]:
        """Yield the first `num_rows` validation rows. Raises DataError if there are fewer."""
        if num_rows > len(self.val):
            raise DataError(f"steps.val_rows is {num_rows}; allowed: 0 to {len(self.val)}, the validation rows")
        for start in range(0, num_rows, micro_batch):
            yield self.val.batch(np.arange(start, min(start + micro_batch, num_rows)))

    def tokenizer(self) -> BpeTokenizer:
        """Load the tokenizer that made the rows."""
        return BpeTokenizer.load(self.folder / _TOKENIZER)


def prepare(config: DataConfig, vocab_size: int, *, cache_dir: Path, report: Report) -> Dataset:
    """Open the dataset of `config` from `cache_dir`, and build it first if it is absent or damaged.

    Reads the whole corpus, because its content decides which dataset it is. Several processes may call it at once: one
    builds, the others wait. `report` receives sentences on the progress. Raises DataError if no dataset can be made
    from the corpus or the vocabulary size.
    """
    sources = Sources(config, vocab_size)
    folder = cache_dir / f"rows-{sources.key}"
    if _damage(folder) is not None:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(folder, report):
            damage = _damage(folder)
            if damage is not None:
                report(f"building {folder.name}: {damage}")
                _build(sources, folder=folder, report=report)
    return _open(folder)


def open_prepared(folder: Path) -> Dataset:
    """Open the dataset that `prepare` left in `folder`, without reading the corpus. Raises DatasetDamaged."""
    damage = _damage(folder, verify_bytes=VERIFY_BYTES)
    if damage is not None:
        raise DatasetDamaged(f"dataset {folder} cannot be used: {damage}; the next preparation builds it again")
    return _open(folder)


@contextmanager
def _locked(folder: Path, report: Report) -> Iterator[None]:
    """Hold the lock of a cache folder. Reports that it waits if another process has the lock."""
    lock = FileLock(folder.with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(f"waiting for another process that builds {folder.name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _open(folder: Path) -> Dataset:
    manifest = _read_manifest(folder)
    return Dataset(
        digest=manifest["digest"],
        seq_len=manifest["seq_len"],
        val_row=manifest.get("val_row", manifest["seq_len"]),
        vocab_size=manifest["vocab_size"],
        val_digest=_val_digest(manifest["files"]),
        train=PackedRows.open(folder, "train"),
        second=PackedRows.open(folder, SECOND) if row_paths(folder, SECOND)[0].name in manifest["files"] else None,
        val=PackedRows.open(folder, "val"),
        folder=folder,
    )


def _val_digest(files: Mapping[str, Mapping[str, Any]]) -> str:
    names = [_TOKENIZER, *(path.name for path in row_paths(Path(), "val"))]
    return _digest({name: files[name]["sha256"] for name in names})


def _damage(folder: Path, *, verify_bytes: float = math.inf) -> str | None:
    """Return why a cache folder cannot be used, or None if it is complete. Hashes contents up to `verify_bytes`."""
    if not folder.is_dir():
        return "not in the cache yet"
    try:
        manifest = _read_manifest(folder)
        if manifest["digest"] != _digest(manifest):
            return f"{_MANIFEST} is damaged: its digest does not match"
        files: dict[str, dict[str, Any]] = manifest["files"]
        for name, entry in files.items():
            size_bytes = (folder / name).stat().st_size
            if size_bytes != entry["bytes"]:
                return f"{name} is damaged: {size_bytes} bytes, expected {entry['bytes']}"
        if sum(entry["bytes"] for entry in files.values()) <= verify_bytes:
            return _changed_content(folder, files)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"unreadable: {error}"
    return None


def _changed_content(folder: Path, files: dict[str, dict[str, Any]]) -> str | None:
    for name, entry in files.items():
        if _sha256(folder / name) != entry["sha256"]:
            return f"{name} is damaged: its SHA-256 does not match"
    return None


def _build(sources: Sources, *, folder: Path, report: Report) -> None:
    """Build a dataset beside `folder` and move it into place. The caller holds the lock."""
    building = folder.with_suffix(".building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    try:
        _write(sources, folder=building, report=report)
        shutil.rmtree(folder, ignore_errors=True)
        building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _write(sources: Sources, *, folder: Path, report: Report) -> None:
    files = [file for _, own, _ in sources.sides for file in own]
    check_texts(files)
    mib = sum(file.size_bytes for file in files) / 2**20
    report(f"training a tokenizer of {sources.vocab_size} tokens on {len(files)} files, {mib:.1f} MiB")
    tokenizer = BpeTokenizer.train(_texts_of_tokenizer(sources), vocab_size=sources.vocab_size)
    tokenizer.save(folder / _TOKENIZER)
    rows = {}
    for side, own, row in sources.sides:
        report(f"encoding {len(own)} files of the {side} split")
        encoded = _encode(tokenizer, own)
        rows[side] = write_rows(encoded, folder, side, seq_len=row, vocab_size=sources.vocab_size)
    described = {"seq_len": sources.seq_len, "vocab_size": tokenizer.vocab_size}
    if sources.val_row != sources.seq_len:
        described["val_row"] = sources.val_row
    # the last field keeps the digest of data that an earlier program prepared
    _write_manifest(folder, {**described, "skipped_not_utf8": 0})
    report(f"packed {sum(rows.values()) - rows['val']} training rows, {rows['val']} validation rows")


def _texts_of_tokenizer(sources: Sources) -> Iterator[str]:
    """Yield the training texts; of two corpora in turn, equally many characters of each."""
    first = read_documents(sources.first.train)
    return first if sources.second is None else in_turn(first, read_documents(sources.second.train))


def in_turn(first: Iterator[str], second: Iterator[str]) -> Iterator[str]:
    """Yield the texts of both, the next one always from the side with fewer characters so far."""
    chars = {False: 0, True: 0}
    sides = {False: first, True: second}
    while sides:
        side = min(sides, key=lambda one: chars[one])
        text = next(sides[side], None)
        if text is None:
            del sides[side]
        else:
            chars[side] += len(text)
            yield text


def _encode(tokenizer: BpeTokenizer, files: Sequence[SourceFile]) -> Iterator[NDArray[np.uint32]]:
    """Yield the tokens of each file in order. Encodes batches of a few MiB."""
    batch: list[str] = []
    chars = 0
    for text in read_documents(files):
        batch.append(text)
        chars += len(text)
        if chars >= _ENCODE_CHARS:
            yield from tokenizer.encode(batch)
            batch, chars = [], 0
    yield from tokenizer.encode(batch)


def _write_manifest(folder: Path, described: dict[str, int]) -> None:
    """Write the manifest with a digest of all files. It comes last, so it marks a finished folder."""
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.iterdir())}
    manifest: dict[str, Any] = {"files": files, **described}
    manifest["digest"] = _digest(manifest)
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _read_manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    return manifest


def _digest(manifest: dict[str, Any]) -> str:
    """Return "sha256:<hex>" of a manifest without its digest."""
    described = {name: value for name, value in manifest.items() if name != "digest"}
    return "sha256:" + hashlib.sha256(json.dumps(described, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
