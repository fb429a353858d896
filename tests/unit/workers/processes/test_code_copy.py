"""Copies of code: their digest follows the content, and nothing outside of the folder gets in."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ablate.experiments.records.code_archive import pack_code, pack_commit
from ablate.experiments.records.code_tree import tree_digest
from ablate.model.errors import DataError
from ablate.workers.commands import code_copy
from ablate.workers.commands.code_copy import archive_path, copy_code
from tests.programs import order_for, program_config, write_program
from tests.repositories import git


def copied(code: object, home: Path) -> tuple[str, Path]:
    result = copy_code(order_for(program_config(None, code=code), home))
    assert result.data_folder is not None
    return str(result.data_digest), result.data_folder


def test_equal_files_are_one_copy_and_any_change_is_another(tmp_path: Path) -> None:
    folder = write_program(tmp_path / "code")
    first = copied(str(folder), tmp_path / "home")
    assert copied(str(folder), tmp_path / "home") == first
    folder.joinpath("train.py").chmod(0o755)
    second = copied(str(folder), tmp_path / "home")
    folder.joinpath("b").mkdir()
    folder.joinpath("b/x").write_text("")
    third = copied(str(folder), tmp_path / "home")
    assert len({first, second, third}) == 3
    assert tree_digest(first[1]) == first[0]


def test_version_control_environments_and_caches_stay_outside(tmp_path: Path) -> None:
    folder = write_program(tmp_path / "code")
    for name in (".git", ".venv", "__pycache__", "sub/node_modules"):
        folder.joinpath(name).mkdir(parents=True)
        folder.joinpath(name, "file").write_text("x")
    os.mkfifo(folder / "pipe")
    _digest, copy = copied(str(folder), tmp_path / "home")
    assert sorted(path.name for path in copy.rglob("*")) == ["train.py"]


def test_a_link_inside_stays_a_link_and_one_outside_is_refused(tmp_path: Path) -> None:
    folder = write_program(tmp_path / "code")
    folder.joinpath("same").symlink_to("train.py")
    _digest, copy = copied(str(folder), tmp_path / "home")
    assert copy.joinpath("same").readlink() == Path("train.py")
    folder.joinpath("secret").symlink_to("/etc/passwd")
    with pytest.raises(DataError, match="secret -> /etc/passwd"):
        copied(str(folder), tmp_path / "home")


def test_too_much_code_and_no_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_program(tmp_path / "code")
    monkeypatch.setattr(code_copy, "MOST_BYTES", 10)
    with pytest.raises(DataError, match="more than"):
        copied(str(folder), tmp_path / "home")
    with pytest.raises(DataError, match="is no folder on this node"):
        copied(str(tmp_path / "absent"), tmp_path / "home")


def test_a_commit_is_read_from_a_repository_whatever_its_work_tree_says(tmp_path: Path) -> None:
    folder = write_program(tmp_path / "code")
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "train.py"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    expected = copied(str(folder), tmp_path / "home")
    folder.joinpath("train.py").write_text("changed")
    assert copied({"git": str(folder), "commit": commit[:8]}, tmp_path / "home") == expected
    with pytest.raises(DataError, match="has no commit '0123456'"):
        copied({"git": str(folder), "commit": "0123456"}, tmp_path / "home")


def test_a_commit_on_a_node_is_the_one_that_people_pack(tmp_path: Path) -> None:
    folder, inner = write_program(tmp_path / "code"), write_program(tmp_path / "inner")
    (folder / ".gitattributes").write_text("*.md export-ignore\n*.sh eol=crlf\nvenv/* -text\n")
    for name in ("notes.md", "run.sh", "venv/left_out.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("a\n")
    (folder / "run.sh").write_bytes(b"a\r\n")
    for repository in (inner, folder):
        git(repository, "init", "-q")
        if repository == folder:
            git(folder, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(inner), "lib")
        git(repository, "add", "--all")
        git(repository, "-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "-qm", "x")
    expected = copied(str(folder), tmp_path / "home")
    assert expected[0] == pack_code(folder).tree == pack_commit(folder, "HEAD").tree
    assert copied({"git": str(folder), "commit": git(folder, "rev-parse", "HEAD")}, tmp_path / "home") == expected
    git(folder, "worktree", "add", "-q", "--detach", str(tmp_path / "linked"))
    git(tmp_path / "linked", "-c", "protocol.file.allow=always", "submodule", "--quiet", "update", "--init")
    assert copied(str(tmp_path / "linked"), tmp_path / "home") == expected
    assert not list(expected[1].rglob(".git"))
    assert not (expected[1] / "venv").exists()
    (folder / "link").symlink_to("/etc/passwd")
    git(folder, "add", "link")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "-qm", "x")
    with pytest.raises(DataError, match="link -> /etc/passwd"):
        copied({"git": str(folder), "commit": git(folder, "rev-parse", "HEAD")}, tmp_path / "home")


def test_code_outside_of_the_operators_folders_is_refused_also_through_a_link(tmp_path: Path) -> None:
    folder, other = write_program(tmp_path / "allowed/code"), write_program(tmp_path / "other")
    tmp_path.joinpath("allowed/link").symlink_to(other)

    def allowed(code: Path, roots: tuple[Path, ...]) -> None:
        order = order_for(program_config(None, code=str(code)), tmp_path / "home")
        copy_code(replace(order, code_roots=roots))

    allowed(folder, (tmp_path / "allowed",))
    for code in (other, tmp_path / "allowed/link", tmp_path / "allowed/../other"):
        with pytest.raises(DataError, match="ABLATE_CODE_DIRS"):
            allowed(code, (tmp_path / "allowed",))
    with pytest.raises(DataError, match="none on this node"):
        allowed(folder, ())


def test_the_oldest_copies_go_and_a_used_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_copy, "KEPT", 3)
    folder, copies = tmp_path / "code", []
    for number in range(5):
        write_program(folder, f"print({number})")
        copies.append(copied(str(folder), tmp_path / "home")[1])
        os.utime(copies[-1], (number, number))
    assert [copy.is_dir() for copy in copies] == [False, False, True, True, True]


def test_an_archive_is_unpacked_as_the_folder_that_it_was_packed_from(tmp_path: Path) -> None:
    folder, home = write_program(tmp_path / "code"), tmp_path / "home"
    packed = pack_code(folder)
    archive = archive_path(home / "data", packed.digest)
    archive.parent.mkdir(parents=True)
    archive.write_bytes(b"".join(packed.pieces()))
    expected = copied(str(folder), home)
    assert expected[0] == packed.tree
    assert copied({"archive": packed.digest}, home) == expected
    archive.write_bytes(archive.read_bytes()[:40])
    with pytest.raises(DataError, match="cannot be unpacked"):
        copied({"archive": packed.digest}, home)


def test_a_copy_that_a_program_changed_is_made_again(tmp_path: Path) -> None:
    folder = write_program(tmp_path / "code")
    digest, copy = copied(str(folder), tmp_path / "home")
    for change in (lambda: (copy / "train.py").write_text("changed"), lambda: (copy / "more.py").write_text("")):
        change()
        assert copied(str(folder), tmp_path / "home") == (digest, copy)
        assert tree_digest(copy) == digest
        assert [path.name for path in copy.iterdir()] == ["train.py"]


def test_an_absolute_link_is_refused_even_inside(tmp_path: Path) -> None:
    folder = write_program(tmp_path / "code")
    folder.joinpath("own").symlink_to(folder / "train.py")
    with pytest.raises(DataError, match="own -> /"):
        copied(str(folder), tmp_path / "home")
