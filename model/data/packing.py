"""Packed rows: documents laid end to end and cut into rows of S + 1 tokens, with a document id per token. Torch-free.

A row gives S inputs and S targets, shifted by one. Every document ends with the end-of-text token, which belongs to it.
The model learns to predict that token, but not the next document's first token from it (that target is masked). Tokens
after the last whole row are dropped.

Shapes: B rows of a batch, S sequence length.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from ablate.model.errors import DataError


class Batch(NamedTuple):
    """One batch on the host; every array is B by S."""

    tokens: NDArray[np.int64]
    """Inputs."""
    targets: NDArray[np.int64]
    """The token after each input, valid or not."""
    segment_ids: NDArray[np.int64]
    """0 at the row's first input, plus 1 at every change of the document."""
    valid: NDArray[np.bool_]
    """Whether the target belongs to the input's document."""

    def joined(self) -> "Batch":
        """Return the batch with one segment per row, so that attention and state cross documents; equal targets."""
        return self._replace(segment_ids=np.zeros_like(self.segment_ids))


def mixed(chosen: NDArray[np.bool_], own: Batch, others: Batch) -> Batch:
    """Return a batch with the rows of `others` where `chosen`, and those of `own` elsewhere, each in its order."""
    parts = []
    for mine, theirs in zip(own, others, strict=True):
        rows = np.empty((len(chosen), mine.shape[1]), dtype=mine.dtype)
        rows[~chosen], rows[chosen] = mine, theirs
        parts.append(rows)
    return Batch(*parts)


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Rows of one side of the split, memory-mapped, read-only."""

    tokens: NDArray[np.unsignedinteger]
    """Rows by S + 1; uint16 where the vocabulary fits, else uint32."""
    doc_ids: NDArray[np.int32]
    """Same shape: index of the document that each token belongs to."""

    @classmethod
    def open(cls, folder: Path, side: str) -> "PackedRows":
        """Map the rows of `side` from `write_rows`."""
        tokens_path, doc_ids_path = row_paths(folder, side)
        return cls(tokens=np.load(tokens_path, mmap_mode="r"), doc_ids=np.load(doc_ids_path, mmap_mode="r"))

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: NDArray[np.intp]) -> Batch:
        """Read the rows at `indices` as one batch."""
        tokens = self.tokens[indices].astype(np.int64)
        doc_ids = self.doc_ids[indices]
        return Batch(
            tokens=tokens[:, :-1],
            targets=tokens[:, 1:],
            segment_ids=segment_ids(doc_ids[:, :-1]),
            valid=doc_ids[:, :-1] == doc_ids[:, 1:],
        )


def visible_pairs(segment_ids_BS: NDArray[np.int64], window: int = 0) -> int:
    """Return the pairs of tokens of which one attends to the other or itself: causal, within documents and a window."""
    starts_BS = np.ones(segment_ids_BS.shape, dtype=bool)
    starts_BS[:, 1:] = segment_ids_BS[:, 1:] != segment_ids_BS[:, :-1]
    lengths = np.diff(np.append(np.flatnonzero(starts_BS), starts_BS.size))
    beyond = (lengths - window).clip(0) if window else np.zeros_like(lengths)  # tokens that do not see the first one
    return int((lengths * (lengths + 1) // 2 - beyond * (beyond + 1) // 2).sum())


def segment_ids(doc_ids_BS: NDArray[np.int32]) -> NDArray[np.int64]:
    """Count the document changes along each row, from 0. An id that returns starts a new segment."""
    segments_BS = np.zeros(doc_ids_BS.shape, dtype=np.int64)
    np.cumsum(doc_ids_BS[:, 1:] != doc_ids_BS[:, :-1], axis=1, out=segments_BS[:, 1:])
    return segments_BS


@lru_cache(maxsize=4)
def epoch_order(num_rows: int, seed: int, epoch: int) -> NDArray[np.intp]:
    """Return the order of rows in one epoch, a permutation that seed and epoch fix on every machine."""
    # raw generator output is stable across numpy versions; Generator.permutation does not promise that
    keys = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(num_rows)
    order = np.argsort(keys, kind="stable")
    order.flags.writeable = False
    return order


def rows_at(places: NDArray[np.int64], *, num_rows: int, seed: int) -> NDArray[np.intp]:
    """Return the rows at `places` of the training order, from 0. Every row occurs once per epoch."""
    epochs, places = np.divmod(places, num_rows)
    picks = [epoch_order(num_rows, seed, int(epoch))[place] for epoch, place in zip(epochs, places, strict=True)]
    return np.array(picks, dtype=np.intp)


def row_paths(folder: Path, side: str) -> tuple[Path, Path]:
    """Return the files with tokens and document ids of a side in a dataset folder."""
    return folder / f"{side}_tokens.npy", folder / f"{side}_doc_ids.npy"


def write_rows(
    documents: Iterable[NDArray[np.uint32]], folder: Path, side: str, *, seq_len: int, vocab_size: int
) -> int:
    """Pack encoded documents into the files of `side` and return the number of rows. Raises DataError for none."""
    dtype: np.dtype[np.unsignedinteger] = np.dtype(np.uint16) if vocab_size <= 2**16 else np.dtype(np.uint32)
    stream = folder / f"{side}.stream"
    lengths = list(_write_stream(documents, stream, dtype))
    num_rows = sum(lengths) // (seq_len + 1)
    if num_rows == 0:
        raise DataError(
            f"the {side} files hold {sum(lengths)} tokens and a row takes seq_len + 1 = {seq_len + 1}; "
            f"use a larger corpus, more max_corpus_mib, another val_fraction or a shorter seq_len"
        )
    shape = (num_rows, seq_len + 1)
    tokens_path, doc_ids_path = row_paths(folder, side)
    tokens = open_memmap(tokens_path, mode="w+", dtype=dtype, shape=shape)
    tokens.reshape(-1)[:] = np.memmap(stream, dtype=dtype, mode="r", shape=(tokens.size,))
    tokens.flush()
    doc_ids = open_memmap(doc_ids_path, mode="w+", dtype=np.int32, shape=shape)
    _fill_doc_ids(doc_ids.reshape(-1), lengths)
    doc_ids.flush()
    stream.unlink()
    return num_rows


def _write_stream(
    documents: Iterable[NDArray[np.uint32]], path: Path, dtype: np.dtype[np.unsignedinteger]
) -> Iterator[int]:
    """Append documents to a flat file, because a corpus may exceed the memory, and yield their lengths."""
    with path.open("wb") as stream:
        for document in documents:
            stream.write(document.astype(dtype).tobytes())
            yield len(document)


def _fill_doc_ids(flat: NDArray[np.int32], lengths: list[int]) -> None:
    start = 0
    for doc_id, length in enumerate(lengths):
        flat[start : start + length] = doc_id
        start += length
