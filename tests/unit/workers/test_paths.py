import os
from pathlib import Path

import pytest

from ablate.workers.paths import WorkPaths


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../../etc", "a\0b"])
def test_trial_rejects_an_id_that_is_no_file_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be a folder name"):
        WorkPaths(home=tmp_path).trial("att_1", name)
    assert not (tmp_path / "work").exists() or list((tmp_path / "work").iterdir()) == [tmp_path / "work" / "att_1"]


def test_clean_keeps_the_newest_attempts(tmp_path: Path) -> None:
    paths = WorkPaths(home=tmp_path)
    paths.clean(keep=1)
    for age, name in enumerate(["newest", "middle", "oldest"]):
        paths.trial(name, "trl")
        os.utime(tmp_path / "work" / name, (1e9 - age, 1e9 - age))
    paths.clean(keep=2)
    assert sorted(path.name for path in paths.root.iterdir()) == ["middle", "newest"]


def test_clean_removes_the_oldest_attempts_beyond_a_size(tmp_path: Path) -> None:
    paths = WorkPaths(home=tmp_path)
    for age, name in enumerate(["newest", "middle", "oldest"]):
        paths.trial(name, "trl").log.write_bytes(b"x" * 400_000)
        os.utime(tmp_path / "work" / name, (1e9 - age, 1e9 - age))
    paths.clean(keep=3, most_bytes=1_000_000)
    assert sorted(path.name for path in paths.root.iterdir()) == ["middle", "newest"]
    paths.clean(keep=3, most_bytes=300_000)
    assert list(paths.root.iterdir()) == []
