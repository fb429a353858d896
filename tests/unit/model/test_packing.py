from pathlib import Path

import numpy as np
import pytest

from ablate.model.data.packing import PackedRows, epoch_order, rows_at, segment_ids, visible_pairs, write_rows
from ablate.model.errors import DataError


def documents(*lengths: int) -> list[np.ndarray]:
    """Documents of running numbers, each ended by token 0."""
    starts = np.cumsum([1, *lengths])
    return [np.array([*range(start, start + n - 1), 0], np.uint32) for start, n in zip(starts, lengths, strict=False)]


def pack(folder: Path, *lengths: int, seq_len: int = 4, vocab_size: int = 512) -> PackedRows:
    write_rows(documents(*lengths), folder, "train", seq_len=seq_len, vocab_size=vocab_size)
    return PackedRows.open(folder, "train")


def test_segment_ids_count_changes_and_number_a_returning_document_anew() -> None:
    doc_ids = np.array([[7, 7, 7, 7], [7, 9, 7, 7], [1, 2, 3, 4]], np.int32)
    np.testing.assert_array_equal(segment_ids(doc_ids), [[0, 0, 0, 0], [0, 1, 2, 2], [0, 1, 2, 3]])


def test_write_rows_lays_documents_end_to_end_and_drops_the_tail(tmp_path: Path) -> None:
    rows = pack(tmp_path, 3, 6, 4)
    np.testing.assert_array_equal(rows.tokens, [[1, 2, 0, 4, 5], [6, 7, 8, 0, 10]])
    np.testing.assert_array_equal(rows.doc_ids, [[0, 0, 0, 1, 1], [1, 1, 1, 1, 2]])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train_doc_ids.npy", "train_tokens.npy"]


def test_batch_shifts_targets_and_masks_those_of_another_document(tmp_path: Path) -> None:
    batch = pack(tmp_path, 3, 6, 4).batch(np.array([1, 0]))
    np.testing.assert_array_equal(batch.tokens, [[6, 7, 8, 0], [1, 2, 0, 4]])
    np.testing.assert_array_equal(batch.targets, [[7, 8, 0, 10], [2, 0, 4, 5]])
    np.testing.assert_array_equal(batch.valid, [[True, True, True, False], [True, True, False, True]])
    np.testing.assert_array_equal(batch.segment_ids, [[0, 0, 0, 0], [0, 0, 0, 1]])
    assert batch.tokens.dtype == batch.targets.dtype == batch.segment_ids.dtype == np.int64


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_write_rows_stores_tokens_as_narrow_as_the_vocabulary_allows(
    tmp_path: Path, vocab_size: int, dtype: type
) -> None:
    write_rows([np.array([vocab_size - 1, 5, 0], np.uint32)], tmp_path, "val", seq_len=2, vocab_size=vocab_size)
    rows = PackedRows.open(tmp_path, "val")
    assert rows.tokens.dtype == dtype
    assert rows.batch(np.array([0])).tokens[0, 0] == vocab_size - 1


def test_write_rows_refuses_documents_shorter_than_one_row(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"hold 4 tokens and a row takes seq_len \+ 1 = 5"):
        pack(tmp_path, 2, 2)


def test_packed_rows_are_read_only(tmp_path: Path) -> None:
    rows = pack(tmp_path, 5)
    with pytest.raises(ValueError, match="read-only"):
        rows.tokens[0, 0] = 1


def test_rows_at_uses_every_row_once_per_epoch() -> None:
    taken = np.concatenate([rows_at(np.arange(4 * step, 4 * step + 4), num_rows=10, seed=3) for step in range(5)])
    np.testing.assert_array_equal(np.sort(taken[:10]), np.arange(10))
    np.testing.assert_array_equal(np.sort(taken[10:]), np.arange(10))
    assert not np.array_equal(taken[:10], taken[10:])


def test_rows_at_takes_a_batch_larger_than_the_epoch() -> None:
    taken = rows_at(np.arange(7), num_rows=3, seed=0)
    np.testing.assert_array_equal(np.bincount(taken[:6], minlength=3), [2, 2, 2])


def test_epoch_order_is_fixed_by_its_seed_on_every_machine() -> None:
    np.testing.assert_array_equal(epoch_order(8, 1, 0), [2, 4, 7, 5, 0, 6, 3, 1])
    assert not np.array_equal(epoch_order(100, 1, 0), epoch_order(100, 2, 0))
    assert not np.array_equal(epoch_order(100, 2**63 - 1, 0), epoch_order(100, 2**63 - 1, 1))


def test_visible_pairs_counts_the_tokens_that_each_token_attends_to():
    generator = np.random.default_rng(20261126)
    for _ in range(80):
        rows, length = generator.integers(1, 6), generator.integers(1, 40)
        ids_BS = (generator.random((rows, length)) < generator.choice([0.0, 0.05, 0.5, 1.0])).cumsum(1)
        runs = [[sum(row[t] == row[u] for u in range(t + 1)) for t in range(length)] for row in ids_BS.tolist()]
        assert visible_pairs(ids_BS) == sum(map(sum, runs))
        window = int(generator.integers(1, 45))
        assert visible_pairs(ids_BS, window) == sum(min(seen, window) for row in runs for seen in row)
    returning = np.array([[7, 7, 3, 7]])
    assert visible_pairs(returning) == 1 + 2 + 1 + 1
