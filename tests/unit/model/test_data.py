import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ablate.model.config import DataConfig
from ablate.model.data import dataset as dataset_module
from ablate.model.data.dataset import Dataset, in_turn, open_prepared, prepare
from ablate.model.data.packing import epoch_order
from ablate.model.errors import DataError, DatasetDamaged
from tests.corpora import copy_headers, small_config, small_dataset
from tests.waiting import LIMIT_S

VOCAB_SIZE = 512

BUILD = """
import sys
import time
from pathlib import Path
from ablate.model.config import DataConfig
from ablate.model.data.dataset import prepare
config = DataConfig(corpus=sys.argv[1], seq_len=64, val_fraction=0.1)
def report(line):
    print(line, flush=True)
    if len(sys.argv) > 3 and line.startswith(sys.argv[3]):
        time.sleep(600)
dataset = prepare(config, 512, cache_dir=Path(sys.argv[2]), report=report)
print("digest", dataset.digest)
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_headers(tmp_path_factory.mktemp("headers"))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return small_dataset(tmp_path_factory.mktemp("dataset"))


def prepare_logged(config: DataConfig, cache: Path) -> tuple[Dataset, list[str]]:
    log: list[str] = []
    return prepare(config, VOCAB_SIZE, cache_dir=cache, report=log.append), log


def build_elsewhere(corpus: Path, cache: Path, *stop_at: str) -> subprocess.Popen[str]:
    """Build in a process of its own; it stands still once it reports a line that begins with `stop_at`."""
    command = [sys.executable, "-c", BUILD, str(corpus), str(cache), *stop_at]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_prepare_builds_once_and_opens_afterwards(corpus: Path, tmp_path: Path) -> None:
    built, log = prepare_logged(small_config(corpus), tmp_path)
    opened, silence = prepare_logged(small_config(corpus), tmp_path)
    assert "not in the cache yet" in log[0]
    assert any("training a tokenizer" in line for line in log)
    assert silence == []
    assert opened.digest == built.digest


def test_prepare_gives_the_same_digest_wherever_corpus_and_cache_lie(corpus: Path, tmp_path: Path) -> None:
    here, _ = prepare_logged(small_config(corpus), tmp_path / "one")
    there, _ = prepare_logged(small_config(copy_headers(tmp_path / "copy")), tmp_path / "two")
    assert here.digest == there.digest


def test_prepare_gives_another_digest_to_other_data(corpus: Path, tmp_path: Path) -> None:
    digests = {
        prepare_logged(small_config(corpus), tmp_path)[0].digest,
        prepare_logged(small_config(corpus, seq_len=65), tmp_path)[0].digest,
        prepare_logged(small_config(corpus, val_fraction=0.4), tmp_path)[0].digest,
        prepare(small_config(corpus), 400, cache_dir=tmp_path, report=lambda _: None).digest,
        prepare_logged(small_config(copy_headers(tmp_path / "more", num_files=25)), tmp_path)[0].digest,
    }
    assert len(digests) == 5


def test_two_corpora_are_mixed_row_by_row_with_one_tokenizer(corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for number in range(30):
        (other / f"{number}.txt").write_text(f"{number} " + "lorem ipsum dolor sit amet " * 40)
    config = small_config(corpus, second_corpus=str(other))
    both, _ = prepare_logged(config, tmp_path / "cache")
    again, silence = prepare_logged(replace(config, second_share=0.5), tmp_path / "cache")
    assert (again.digest, silence) == (both.digest, [])
    assert both.second is not None
    assert "ipsum" in both.tokenizer().decode(both.second.tokens[0])
    assert len({both.digest, prepare_logged(small_config(corpus), tmp_path / "cache")[0].digest}) == 2
    assert both.val_digest != prepare_logged(small_config(corpus), tmp_path / "cache")[0].val_digest
    chance = np.random.default_rng(3)
    for share in (0.0, 1.0, 1 / 3, *chance.uniform(0, 1, 4)):
        taken = dict.fromkeys(("train", "second"), 0)
        for step in range(20):
            batch = both.batch(step, 3, seed=7, second_share=share)
            for place in range(3):
                number = 3 * step + place
                side = "second" if math.floor((number + 1) * share) > math.floor(number * share) else "train"
                rows = getattr(both, side)
                epoch, row = divmod(taken[side], len(rows))
                expected = rows.batch(epoch_order(len(rows), 7, epoch)[row : row + 1])
                for batch_part, expected_part in zip(batch, expected, strict=True):
                    np.testing.assert_array_equal(batch_part[place], expected_part[0])
                taken[side] += 1
        assert abs(taken["second"] - 60 * share) < 1
    with pytest.raises(DataError, match="there is no second corpus"):
        prepare_logged(small_config(corpus), tmp_path / "cache")[0].batch(0, 4, 1, second_share=0.5)


def test_texts_of_two_corpora_come_in_turn() -> None:
    texts = list(in_turn(iter(["aaaa", "aa", "a"]), iter(["b", "bb", "bbb"])))
    assert texts == ["aaaa", "b", "bb", "bbb", "aa", "a"]


def test_prepare_notices_an_edited_file_of_equal_size_and_time(tmp_path: Path) -> None:
    corpus = copy_headers(tmp_path / "corpus")
    before, _ = prepare_logged(small_config(corpus), tmp_path / "cache")
    edited = sorted(corpus.iterdir())[3]
    times = edited.stat()
    edited.write_text(edited.read_text().replace("namespace", "Namespace"))
    os.utime(edited, ns=(times.st_atime_ns, times.st_mtime_ns))
    after, log = prepare_logged(small_config(corpus), tmp_path / "cache")
    assert log
    assert after.digest != before.digest


def test_rows_hold_the_text_of_the_training_files(corpus: Path, dataset: Dataset) -> None:
    flat, doc_ids = dataset.train.tokens.reshape(-1), dataset.train.doc_ids.reshape(-1)
    texts = {path.read_text() for path in corpus.iterdir()}
    tokenizer = dataset.tokenizer()
    num_whole = int(doc_ids[-1])
    assert num_whole > 15
    for doc_id in range(num_whole):
        assert tokenizer.decode(flat[doc_ids == doc_id]) in texts
    assert int(flat.max()) < dataset.vocab_size <= VOCAB_SIZE


def test_validation_files_are_not_trained_on(dataset: Dataset) -> None:
    tokenizer = dataset.tokenizer()
    held_out = tokenizer.decode(dataset.val.tokens[0])
    trained = tokenizer.decode(dataset.train.tokens.reshape(-1))
    assert held_out.strip()
    assert held_out not in trained


def test_targets_across_documents_are_invalid_and_all_others_valid(dataset: Dataset) -> None:
    everything = dataset.train.batch(np.arange(len(dataset.train)))
    (end_of_text,) = dataset.tokenizer().encode([""])[0]
    ends = everything.tokens == end_of_text
    assert ends.sum() > 15
    np.testing.assert_array_equal(everything.valid, ~ends)
    np.testing.assert_array_equal(np.diff(everything.segment_ids, axis=1), ends[:, :-1].astype(int))
    assert (everything.targets[everything.valid] == end_of_text).any()


def test_batch_is_the_same_for_a_seed_and_differs_between_seeds(dataset: Dataset) -> None:
    first, again, other = dataset.batch(2, 4, 7), dataset.batch(2, 4, 7), dataset.batch(2, 4, 8)
    for left, right in zip(first, again, strict=True):
        np.testing.assert_array_equal(left, right)
    assert not np.array_equal(first.tokens, other.tokens)
    assert first.tokens.shape == first.valid.shape == (4, 64)


def test_val_batches_cover_the_asked_rows_in_order(dataset: Dataset) -> None:
    batches = list(dataset.val_batches(5, 2))
    assert [len(batch.tokens) for batch in batches] == [2, 2, 1]
    np.testing.assert_array_equal(np.concatenate([batch.tokens for batch in batches]), dataset.val.tokens[:5, :-1])


def test_val_batches_refuse_more_rows_than_held_out(dataset: Dataset) -> None:
    held_out = len(dataset.val)
    with pytest.raises(DataError, match=f"steps.val_rows is {held_out + 1}; allowed: 0 to {held_out}"):
        next(dataset.val_batches(held_out + 1, 2))


def test_prepare_refuses_files_that_are_not_utf8_text(tmp_path: Path) -> None:
    corpus = copy_headers(tmp_path / "corpus")
    (corpus / "latin1.h").write_bytes(b"// \xe9\xe8\n" * 50)
    with pytest.raises(DataError, match=r"1 of 25 corpus files are not text in UTF-8: .*latin1.h looks like"):
        prepare_logged(small_config(corpus), tmp_path / "cache")


def test_open_prepared_reads_no_corpus_and_refuses_a_damaged_folder(tmp_path: Path) -> None:
    corpus = copy_headers(tmp_path / "corpus")
    built, _ = prepare_logged(small_config(corpus), tmp_path / "cache")
    shutil.rmtree(corpus)
    assert open_prepared(built.folder).digest == built.digest
    flip_a_byte(built.folder)
    with pytest.raises(DatasetDamaged, match=r"val_doc_ids.npy is damaged: its SHA-256 .* builds it again"):
        open_prepared(built.folder)


def test_prepare_hashes_a_dataset_that_is_too_large_for_a_trial_to_hash(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_module, "VERIFY_BYTES", 1000)
    built, _ = prepare_logged(small_config(corpus), tmp_path)
    flip_a_byte(built.folder)
    assert open_prepared(built.folder).digest == built.digest
    assert "val_doc_ids.npy is damaged: its SHA-256" in prepare_logged(small_config(corpus), tmp_path)[1][0]


def test_prepare_refuses_a_corpus_shorter_than_one_row(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for name in ("a.h", "b.h"):
        (tmp_path / "corpus" / name).write_text("int x;\n")
    with pytest.raises(DataError, match="tokens and a row takes"):
        prepare_logged(small_config(tmp_path / "corpus"), tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_prepare_takes_the_default_corpus(tmp_path: Path) -> None:
    dataset, _ = prepare_logged(DataConfig(seq_len=128, max_corpus_mib=1), tmp_path)
    assert len(dataset.train) > 1000
    assert len(dataset.val) > 16


def truncate(folder: Path) -> None:
    os.truncate(folder / "train_tokens.npy", 1000)


def flip_a_byte(folder: Path) -> None:
    path = folder / "val_doc_ids.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def remove_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def edit_the_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["train_tokens.npy"]["bytes"] -= 1
    path.write_text(json.dumps(manifest))


def cut_the_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:50])


def drop_the_description(folder: Path) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["vocab_size"]
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, "train_tokens.npy is damaged: 1000 bytes"),
        (flip_a_byte, "val_doc_ids.npy is damaged: its SHA-256"),
        (remove_the_manifest, "unreadable"),
        (edit_the_manifest, "manifest.json is damaged"),
        (cut_the_manifest, "unreadable"),
        (drop_the_description, "manifest.json is damaged"),
    ],
)
def test_prepare_rebuilds_a_damaged_dataset_and_says_so(
    corpus: Path, tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    built, _ = prepare_logged(small_config(corpus), tmp_path)
    damage(built.folder)
    rebuilt, log = prepare_logged(small_config(corpus), tmp_path)
    assert said in log[0]
    assert rebuilt.digest == built.digest
    assert prepare_logged(small_config(corpus), tmp_path)[1] == []


def test_two_processes_build_once(corpus: Path, tmp_path: Path) -> None:
    processes = [build_elsewhere(corpus, tmp_path) for _ in range(2)]
    outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum("training a tokenizer" in output for output in outputs) == 1
    assert len({output.split("digest ")[1] for output in outputs}) == 1


def test_prepare_builds_again_after_a_builder_was_killed(corpus: Path, tmp_path: Path) -> None:
    expected, _ = prepare_logged(small_config(corpus), tmp_path / "other")
    victim = build_elsewhere(corpus, tmp_path, "encoding")
    assert victim.stdout is not None
    with victim.stdout:
        for line in victim.stdout:
            if line.startswith("encoding"):
                victim.send_signal(signal.SIGKILL)
                break
    assert victim.wait(timeout=LIMIT_S) == -signal.SIGKILL
    assert list(tmp_path.glob("*.building"))
    rebuilt, log = prepare_logged(small_config(corpus), tmp_path)
    assert "not in the cache yet" in log[0]
    assert rebuilt.digest == expected.digest
    assert not list(tmp_path.glob("*.building"))
