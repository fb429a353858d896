"""Byte-level BPE trained on the training split. It encodes any text without unknown tokens. Torch-free.

Training reads at most TRAIN_TEXT_CHARS of text. Merges from a sample of that size compress the rest equally well, and
preparation takes only seconds. A word longer than MAX_WORD_BYTES is cut, because the time of training grows with the
square of a word's length. The same text gives the same tokenizer with any number of threads.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from ablate.model.errors import DataError

VERSION = 2
"""Part of the cache key. Raise it when the same text is tokenised differently."""

END_OF_TEXT = "<|endoftext|>"
"""Token that ends every document. In a source file it is plain text."""

TRAIN_TEXT_CHARS = 8 * 2**20
"""Most characters of text for learning the merges."""

MAX_WORD_BYTES = 1024
"""Longest run of letters, digits, signs or spaces that merges may cross; no token is longer."""

MIN_VOCAB_SIZE = 257
"""256 bytes and the end of text."""


class BpeTokenizer:
    """Encodes documents to token ids."""

    def __init__(self, engine: Tokenizer) -> None:
        self._engine = engine
        self._engine.pre_tokenizer = _cut_words()
        self._engine.encode_special_tokens = True
        end_of_text = engine.token_to_id(END_OF_TEXT)
        if end_of_text is None:
            raise DataError(f"the tokenizer has no token {END_OF_TEXT}; it was not trained here")
        self._end_of_text = end_of_text

    @classmethod
    def train(cls, documents: Iterable[str], *, vocab_size: int) -> "BpeTokenizer":
        """Learn at most `vocab_size` tokens from a sample of `documents`. Raises DataError if that is too few."""
        if vocab_size < MIN_VOCAB_SIZE:
            raise DataError(f"vocab_size is {vocab_size}; allowed: at least {MIN_VOCAB_SIZE} (bytes and end of text)")
        engine = Tokenizer(models.BPE())
        engine.pre_tokenizer = _cut_words()
        engine.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        engine.train_from_iterator(_sample(documents), trainer)
        return cls(engine)

    @classmethod
    def load(cls, path: Path) -> "BpeTokenizer":
        """Read a tokenizer written by `save`."""
        return cls(Tokenizer.from_str(path.read_text(encoding="utf-8")))

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON, without the cut of long words, which `load` adds."""
        plain = Tokenizer.from_str(self._engine.to_str())
        plain.pre_tokenizer = _words()
        path.write_text(plain.to_str(), encoding="utf-8")

    @property
    def vocab_size(self) -> int:
        """Number of tokens, below the requested size if the text has no more pairs to merge."""
        return int(self._engine.get_vocab_size())

    def encode(self, documents: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Encode documents in parallel. Each result ends with the end-of-text token."""
        encodings = self._engine.encode_batch_fast(list(documents), add_special_tokens=False)
        return [np.array([*encoding.ids, self._end_of_text], dtype=np.uint32) for encoding in encodings]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens` without the end-of-text token."""
        return str(self._engine.decode([int(token) for token in tokens], skip_special_tokens=True))


def _words() -> pre_tokenizers.PreTokenizer:
    """Return the step that splits a text into words, with one character per byte."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _cut_words() -> pre_tokenizers.PreTokenizer:
    """Return the same step with long words cut."""
    return pre_tokenizers.Sequence([_words(), pre_tokenizers.Split(Regex(f".{{{MAX_WORD_BYTES}}}"), "isolated")])


def _sample(documents: Iterable[str]) -> Iterator[str]:
    """Yield documents up to TRAIN_TEXT_CHARS in all. The last one may be cut."""
    left = TRAIN_TEXT_CHARS
    for document in documents:
        yield document[:left]
        left -= len(document)
        if left <= 0:
            return
