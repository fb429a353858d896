import os
import stat
from pathlib import Path

import pytest

from ablate.workers.paths import WorkPaths, remove_tree


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


def test_a_link_in_place_of_a_folder_is_removed_without_its_target(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "file").write_text("x")
    (target / "file").chmod(0o400)
    (tmp_path / "link").symlink_to(target)
    remove_tree(tmp_path / "link")
    assert not (tmp_path / "link").is_symlink()
    assert stat.S_IMODE((target / "file").stat().st_mode) == 0o400, "the trial could let the worker open it"


@pytest.mark.parametrize("left", ["nothing", "folder", "file", "link", "closed folder"])
def test_a_place_is_made_an_empty_folder_whatever_a_trial_left(tmp_path: Path, left: str) -> None:
    paths = WorkPaths(home=tmp_path).trial("att_1", "trl_1")
    place, other = paths.evaluation, tmp_path / "other"
    other.mkdir()
    (other / "file").touch()
    if left.endswith("folder"):
        (place / "code").mkdir(parents=True)
        (place / "code/judge.py").touch()
        place.chmod(0 if left.startswith("closed") else 0o755)
        paths.folder.chmod(0o500)
    elif left == "file":
        place.touch()
    elif left == "link":
        place.symlink_to(other)
    paths.make_empty(place)
    assert (list(place.iterdir()), place.is_symlink()) == ([], False)
    assert [path.name for path in paths.folder.iterdir()] == ["evaluation"]
    assert list(other.iterdir())
