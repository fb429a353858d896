import os
import random
from pathlib import Path

import pytest

from model.data.corpus import TORCH_HEADERS
from model.errors import DataError
from workers.processes.trial import check_corpus


def test_check_corpus_without_a_list_allows_any_folder() -> None:
    check_corpus("/root", None)


def test_check_corpus_torch_headers_are_always_allowed() -> None:
    check_corpus(TORCH_HEADERS, ())
    with pytest.raises(DataError, match=r"allowed: 'torch-headers' \(ABLATE_CORPUS_DIRS\)$"):
        check_corpus("/root", ())


def test_check_corpus_of_random_paths_against_where_they_really_lead(tmp_path: Path) -> None:
    """Folders, links between them, and dots; the kernel says where a path leads."""
    draw = random.Random(20261122)  # noqa: S311 - a repeatable draw
    roots = (tmp_path / "allowed", tmp_path / "also")
    folders = [base / name for base in (*roots, tmp_path / "allowed-not", tmp_path / "other") for name in ("a", "b")]
    for folder in folders:
        folder.mkdir(parents=True)
    for number in range(12):
        (draw.choice(folders) / f"link{number}").symlink_to(draw.choice(folders))
    links = list(tmp_path.glob("*/*/link*"))
    seen = {True: 0, False: 0}
    for _ in range(1200):
        path = draw.choice([*folders, *links])
        for _ in range(draw.randrange(4)):
            path = path / draw.choice(["..", ".", "../..", *[link.name for link in links]])
        try:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue
        real = Path(f"/proc/self/fd/{handle}").readlink()
        os.close(handle)
        allowed = any(real == root or root in real.parents for root in roots)
        seen[allowed] += 1
        if allowed:
            check_corpus(str(path), roots)
        else:
            with pytest.raises(DataError, match="outside of the folders"):
                check_corpus(str(path), roots)
    assert min(seen.values()) > 50
