"""A small dataset that all tests of training share: preparing it takes a second."""

from pathlib import Path

import pytest

from ablate.model.data.dataset import Dataset
from tests.corpora import small_dataset


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("small")


@pytest.fixture(scope="session")
def dataset(home: Path) -> Dataset:
    return small_dataset(home)
