import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ablate.model.data import tokenizer
from ablate.model.data.tokenizer import END_OF_TEXT, BpeTokenizer
from ablate.model.errors import DataError
from tests.corpora import copy_headers


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = copy_headers(tmp_path_factory.mktemp("headers"))
    return [path.read_text() for path in sorted(folder.iterdir())]


@pytest.fixture(scope="module")
def trained(texts: list[str]) -> BpeTokenizer:
    return BpeTokenizer.train(texts, vocab_size=600)


@pytest.mark.parametrize("text", ["", "int x = 0;\n", "\t\ttabs  and   spaces \r\n", "naïve 漢字 🙂", "\0\x01\x7f"])
def test_encode_then_decode_gives_the_text_back(trained: BpeTokenizer, text: str) -> None:
    (tokens,) = trained.encode([text])
    assert trained.decode(tokens) == text


def test_encode_ends_each_document_with_the_end_of_text_token_once(trained: BpeTokenizer, texts: list[str]) -> None:
    encoded = trained.encode(texts)
    (empty,) = trained.encode([""])
    assert len(empty) == 1
    for tokens in encoded:
        assert tokens[-1] == empty[0]
        assert empty[0] not in tokens[:-1]


def test_encode_takes_the_written_end_of_text_as_plain_text(trained: BpeTokenizer) -> None:
    (tokens,) = trained.encode([f"a{END_OF_TEXT}b"])
    assert tokens[-1] not in tokens[:-1]
    assert trained.decode(tokens) == f"a{END_OF_TEXT}b"


def test_train_learns_merges_within_the_vocabulary(trained: BpeTokenizer, texts: list[str]) -> None:
    assert trained.vocab_size == 600
    encoded = trained.encode(texts)
    assert max(int(tokens.max()) for tokens in encoded) < 600
    assert sum(len(tokens) for tokens in encoded) < 0.6 * sum(len(text.encode()) for text in texts)


def test_train_on_one_thread_gives_the_same_tokenizer(tmp_path: Path, trained: BpeTokenizer) -> None:
    copy_headers(tmp_path / "headers")
    script = (
        "import sys; from pathlib import Path; from ablate.model.data.tokenizer import BpeTokenizer;"
        "folder = Path(sys.argv[1]); files = sorted((folder / 'headers').iterdir());"
        "BpeTokenizer.train([f.read_text() for f in files], vocab_size=600).save(folder / 'other.json')"
    )
    environment = os.environ | {"RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "1"}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, env=environment)
    trained.save(tmp_path / "here.json")
    assert (tmp_path / "other.json").read_bytes() == (tmp_path / "here.json").read_bytes()


def test_cutting_long_words_changes_nothing_in_ordinary_text(
    trained: BpeTokenizer, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "MAX_WORD_BYTES", 10**5)
    uncut = BpeTokenizer.train(texts, vocab_size=600)
    for one, other in zip(trained.encode(texts), uncut.encode(texts), strict=True):
        np.testing.assert_array_equal(one, other)


LETTERS = random.Random(1).choices("ACGT", k=400_000)  # noqa: S311 - repeatable text
"""One word. Training took over four minutes when a word was not cut."""
WORDS = {"genome": "".join(LETTERS), "one letter": "a" * 400_000, "spaces": " " * 400_000, "Japanese": "日本" * 100_000}


@pytest.mark.parametrize("kind", WORDS)
def test_train_on_one_long_word_takes_seconds_and_loses_no_byte(kind: str, tmp_path: Path) -> None:
    began = time.process_time()
    trained = BpeTokenizer.train([WORDS[kind]], vocab_size=4096)
    (tokens,) = trained.encode([WORDS[kind]])
    assert time.process_time() - began < 60
    assert trained.decode(tokens) == WORDS[kind]
    trained.save(tmp_path / "tokenizer.json")
    np.testing.assert_array_equal(BpeTokenizer.load(tmp_path / "tokenizer.json").encode([WORDS[kind]])[0], tokens)
    assert len(tokens) < 300_000


def test_load_encodes_as_the_saved_one(tmp_path: Path, trained: BpeTokenizer, texts: list[str]) -> None:
    trained.save(tmp_path / "tokenizer.json")
    loaded = BpeTokenizer.load(tmp_path / "tokenizer.json")
    for before, after in zip(trained.encode(texts), loaded.encode([*texts]), strict=True):
        np.testing.assert_array_equal(before, after)
    assert loaded.decode(loaded.encode([END_OF_TEXT])[0]) == END_OF_TEXT


def test_train_refuses_a_vocabulary_below_the_bytes(texts: list[str]) -> None:
    with pytest.raises(DataError, match="vocab_size is 256; allowed: at least 257"):
        BpeTokenizer.train(texts, vocab_size=256)


def test_train_stops_reading_at_its_sample(monkeypatch: pytest.MonkeyPatch, texts: list[str]) -> None:
    monkeypatch.setattr(tokenizer, "TRAIN_TEXT_CHARS", 1000)
    taken: list[str] = []

    def documents() -> Iterator[str]:
        for text in texts:
            taken.append(text)
            yield text

    sampled = BpeTokenizer.train(documents(), vocab_size=400)
    assert sum(len(text) for text in taken[:-1]) < 1000
    assert len(taken) < len(texts)
    assert sampled.encode(texts)[0][-1] == sampled.encode([""])[0][0]
