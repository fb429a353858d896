"""Small real corpora for tests: C++ headers taken from the installed torch package."""

import shutil
from pathlib import Path

from ablate.model.config import DataConfig
from ablate.model.data.corpus import TORCH_HEADERS, corpus_root
from ablate.model.data.dataset import Dataset, prepare


def copy_headers(folder: Path, *, num_files: int = 24) -> Path:
    """Copy the first headers of c10/util, by name, into `folder` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    headers = sorted((corpus_root(TORCH_HEADERS) / "c10" / "util").glob("*.h"))[:num_files]
    assert len(headers) == num_files
    for header in headers:
        shutil.copyfile(header, folder / header.name)
    return folder


def small_config(corpus: Path, **changes: object) -> DataConfig:
    """Return a data configuration of rows of 64 tokens over `corpus`."""
    return DataConfig(**{"corpus": str(corpus), "seq_len": 64, "val_fraction": 0.1, **changes})  # type: ignore[arg-type]


def small_dataset(folder: Path, **changes: object) -> Dataset:
    """Prepare a dataset of a few C++ headers below `folder`, vocabulary 512."""
    corpus = copy_headers(folder / "corpus")
    return prepare(small_config(corpus, **changes), 512, cache_dir=folder / "cache", report=lambda _: None)
