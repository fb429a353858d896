"""Commits as arms: what is packed is what a clone and a checkout have, or the refusal names why it is not."""

import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from experiments.errors import CodeArchiveError
from experiments.records.code_archive import PackedCode, pack_code, pack_commit, unpack_code
from tests.repositories import SETTINGS, DrawnRepository, checked_out, git, is_clean, submodules_of, walked


SEEDS = range(int(os.environ.get("SEEDS0", 0)), int(os.environ.get("SEEDS", 15)))


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A person's git configuration, which clones have, too."""
    path = tmp_path / "gitconfig"
    path.write_text(SETTINGS.format(autocrlf="false"))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(path))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    return path


def files_of(packed: PackedCode, target: Path) -> dict[bytes, tuple[str, bytes]]:
    archive = target.with_suffix(".tar.gz")
    archive.write_bytes(b"".join(packed.pieces()))
    unpack_code(archive, target)
    found = walked(target)
    shutil.rmtree(target)
    return found


def below(files: Mapping[bytes, Any], folder: bytes) -> dict[bytes, Any]:
    return {name.removeprefix(folder): file for name, file in files.items() if name.startswith(folder)}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_commit_is_what_a_clone_checks_out(tmp_path: Path, settings: Path, seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - a reproducible draw
    settings.write_text(SETTINGS.format(autocrlf=draw.choice(["false", "false", "true", "input"])))
    repository = DrawnRepository(tmp_path / "origin", draw)
    lab, oracle = repository.clone(tmp_path / "lab"), repository.clone(tmp_path / "oracle")
    bare = repository.clone(tmp_path / "bare.git", "--bare")
    status = git(lab, "status", "--porcelain")
    for commit in git(lab, "rev-list", "HEAD").split():
        expected = checked_out(oracle, commit)
        try:
            packed = pack_commit(lab, commit)
        except CodeArchiveError as error:
            assert "pointer of git-lfs" in error.detail
            continue
        assert files_of(packed, tmp_path / "copy") == expected
        if commit == git(lab, "rev-parse", "HEAD"):
            assert pack_code(lab).tree == packed.tree
            assert not (lab / "sub").is_dir() or pack_code(lab / "sub").tree == pack_commit(lab / "sub", commit).tree
        if (lab / "sub").is_dir() and (part := below(expected, b"sub/")):
            assert files_of(pack_commit(lab / "sub", commit), tmp_path / "copy") == part
        try:
            assert pack_commit(bare, commit).tree == packed.tree
        except CodeArchiveError as error:
            assert "submodule" in error.detail or "pointer of git-lfs" in error.detail
    assert git(lab, "status", "--porcelain") == status


def author(lab: Path, origin: Path, _draw: random.Random) -> Path:
    """Files as somebody wrote them, which no checkout has converted."""
    shutil.rmtree(lab)
    return Path(shutil.copytree(origin, lab, symlinks=True))


def linked(lab: Path, _origin: Path, _draw: random.Random) -> Path:
    """Return a work tree whose submodules nobody checked out."""
    git(lab, "worktree", "add", "-q", str(lab.parent / "linked"))
    return lab.parent / "linked"


def sparse(lab: Path, _origin: Path, _draw: random.Random) -> Path:
    git(lab, "sparse-checkout", "set", "--no-cone", "/sub/")
    return lab


def assumed(lab: Path, _origin: Path, draw: random.Random, flag: str = "--assume-unchanged") -> Path:
    name = drawn_file(lab, draw)
    git(lab, "update-index", flag, "--", name)
    (lab / name).write_bytes(b"changed") if draw.random() < 0.7 else (lab / name).unlink()
    return lab


def skipped(lab: Path, origin: Path, draw: random.Random) -> Path:
    return assumed(lab, origin, draw, "--skip-worktree")


def without_modes(lab: Path, _origin: Path, draw: random.Random) -> Path:
    git(lab, "config", "core.fileMode", "false")
    (lab / drawn_file(lab, draw)).chmod(draw.choice([0o644, 0o755]))
    return lab


def with_environment(lab: Path, _origin: Path, _draw: random.Random) -> Path:
    (lab / "sub").mkdir(exist_ok=True)
    (lab / "sub/pyvenv.cfg").write_text("")
    (lab / ".git/info/exclude").write_text("pyvenv.cfg\n")
    return lab


def other_line_ends(lab: Path, _origin: Path, draw: random.Random) -> Path:
    git(lab, "config", "core.autocrlf", draw.choice(["true", "input"]))
    return lab


def without_submodules(lab: Path, _origin: Path, _draw: random.Random) -> Path:
    git(lab, "submodule", "--quiet", "deinit", "--force", "--all")
    return lab


def other_submodule(lab: Path, _origin: Path, draw: random.Random) -> Path:
    """Return a work tree whose submodules have another commit, which git is told to ignore."""
    for name in submodules_of(lab):
        git(lab, "config", f"submodule.{name}.ignore", "all")
        (lab / name / draw.choice("ab")).write_text("new")
        git(lab / name, "add", "--all")
        git(lab / name, "commit", "-qm", "new", "--allow-empty")
    return lab


def drawn_file(lab: Path, draw: random.Random) -> str:
    return draw.choice([name for name in git(lab, "ls-files", "-z").split("\0") if name and (lab / name).is_file()])


WORK_TREES = {
    author: "a checkout writes other bytes",
    linked: "submodule",
    sparse: "sparse-checkout disable",
    assumed: "--no-assume-unchanged",
    skipped: "--no-skip-worktree",
    without_modes: "core.fileMode=false",
    with_environment: "environment",
    other_line_ends: "core.autocrlf",
    without_submodules: "submodule",
    other_submodule: "submodule",
}
"""Odd work trees, and a word of each refusal for that oddness."""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_clean_work_tree_is_its_commit_or_the_refusal_names_why(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - a reproducible draw
    repository, (oddity, word) = DrawnRepository(tmp_path / "origin", draw), draw.choice([*WORK_TREES.items()])
    lab = oddity(repository.clone(tmp_path / "lab"), repository.folder, draw)
    clean = is_clean(lab)
    try:
        tree = pack_commit(lab, "HEAD").tree
    except CodeArchiveError as error:
        print(word, "|", error)
        assert word in str(error)
        assert error.hint
    else:
        print("CLEAN" if clean else "modified", word)
        assert tree == pack_code(lab).tree or not clean
