import os
from pathlib import Path

import pytest

from workers.paths import WorkPaths, usage_of


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


def test_the_output_of_a_trial_goes_when_its_attempt_uses_too_much(tmp_path: Path) -> None:
    paths = WorkPaths(home=tmp_path)
    first, second = (paths.trial("att", name) for name in ("trl_1", "trl_2"))
    for trial in (first, second):
        trial.log.write_text("log")
        (trial.folder / "checkpoint").write_bytes(bytes(400_000))
        assert trial.drop_excess(500_000) == (trial is second)
    assert [path.name for path in sorted(first.folder.iterdir())] == ["checkpoint", "log.txt"]
    assert [path.name for path in second.folder.iterdir()] == ["log.txt"]


def test_usage_counts_files_of_every_depth_and_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/file").write_bytes(bytes(100_000))
    (tmp_path / "a/all").symlink_to("/usr")
    usage = usage_of(tmp_path / "a")
    assert usage.files == 3
    assert 100_000 <= usage.bytes < 200_000
    assert usage_of(tmp_path / "absent").files == 0
