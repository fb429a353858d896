import os
from pathlib import Path

import pytest

from workers.paths import WorkPaths, write_whole


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../../etc", "a\0b"])
def test_trial_hostile_id_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be a folder name"):
        WorkPaths(home=tmp_path).trial("att_1", name)
    assert not (tmp_path / "work").exists() or list((tmp_path / "work").iterdir()) == [tmp_path / "work" / "att_1"]


def test_trial_files_lie_below_attempt_and_trial(tmp_path: Path) -> None:
    paths = WorkPaths(home=tmp_path).trial("att_1", "trl_1")
    folder = tmp_path / "work" / "att_1" / "trl_1"
    assert folder.is_dir()
    assert {paths.log, paths.steps, paths.result, paths.receipt} == {
        folder / "log.txt",
        folder / "steps.jsonl",
        folder / "result.json",
        folder / "receipt.json",
    }


def test_clean_keeps_youngest_attempts(tmp_path: Path) -> None:
    jobs = WorkPaths(home=tmp_path)
    for age, name in enumerate(["youngest", "middle", "oldest"]):
        jobs.trial(name, "trl")
        os.utime(tmp_path / "work" / name, (1e9 - age, 1e9 - age))
    jobs.clean(keep=2)
    assert sorted(path.name for path in jobs.root.iterdir()) == ["middle", "youngest"]


def test_clean_without_any_attempt(tmp_path: Path) -> None:
    WorkPaths(home=tmp_path).clean(keep=1)


def test_write_whole_replaces_and_leaves_no_part(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    target.write_text("old")
    write_whole(target, "new")
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]
