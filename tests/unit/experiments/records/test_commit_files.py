"""Commits as arms: what is packed is what a clone and a checkout have, or the refusal names why it is not."""

import os
import random
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ablate.experiments.errors import CodeArchiveError
from ablate.experiments.records.code_archive import PackedCode, pack_code, pack_commit, unpack_code
from ablate.experiments.records.code_tree import tree_digest
from ablate.experiments.records.commit_files import write_commit
from tests.repositories import SETTINGS, DrawnRepository, checked_out, git, is_clean, submodules_of, walked

SEEDS = range(8)


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
    files = walked(target)
    shutil.rmtree(target)
    return files


def packed_or_refused(folder: Path, revision: str) -> PackedCode | str:
    try:
        return pack_commit(folder, revision)
    except CodeArchiveError as error:
        return str(error)


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
        packed = packed_or_refused(lab, commit)
        if isinstance(packed, str):
            assert ("pointer of git-lfs" if expected else "has no files") in packed
            continue
        assert files_of(packed, tmp_path / "copy") == expected
        if commit == git(lab, "rev-parse", "HEAD"):
            assert pack_code(lab).tree == packed.tree
            assert not (lab / "sub").is_dir() or pack_code(lab / "sub").tree == pack_commit(lab / "sub", commit).tree
        if (lab / "sub").is_dir() and (part := below(expected, b"sub/")):
            assert files_of(pack_commit(lab / "sub", commit), tmp_path / "copy") == part
        in_bare = packed_or_refused(bare, commit)
        if isinstance(in_bare, str):
            assert "submodule" in in_bare or "pointer of git-lfs" in in_bare
        else:
            assert in_bare.tree == packed.tree
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
    packed = packed_or_refused(lab, "HEAD")
    if isinstance(packed, str):
        assert word in packed
    else:
        assert packed.tree == pack_code(lab).tree or not clean


def lab_of(folder: Path, *commits: Mapping[str, str]) -> Path:
    """A repository with a commit for each of these trees."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q")
    for files in commits:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        git(folder, "add", "--all")
        git(folder, "commit", "-qm", "x", "--allow-empty")
    return folder


def refused(folder: Path, revision: str = "HEAD") -> str:
    with pytest.raises(CodeArchiveError) as caught:
        pack_commit(folder, revision)
    assert caught.value.hint
    return str(caught.value)


def test_another_commit_of_a_submodule_alone_is_another_arm(tmp_path: Path) -> None:
    inner = lab_of(tmp_path / "inner", {"x": "1"}, {"x": "2"})
    lab = lab_of(tmp_path / "lab", {"train.py": ""})
    git(lab, "submodule", "--quiet", "add", str(inner), "lib")
    git(lab, "commit", "-qm", "with the submodule")
    git(lab / "lib", "checkout", "-q", "HEAD~1")
    git(lab, "commit", "-qam", "an older one")
    trees = [pack_commit(lab, revision).tree for revision in ("HEAD", "HEAD~1", "HEAD~2")]
    assert len({*trees, pack_code(lab).tree}) == 3
    git(lab, "rm", "-qf", "lib")
    git(lab, "commit", "-qm", "without")
    assert [pack_commit(lab, revision).tree for revision in ("HEAD~1", "HEAD~2")] == trees[:2], "git keeps its objects"
    alone = tmp_path / "alone"
    git(tmp_path, "clone", "-q", str(lab), str(alone))
    for folder in (alone, alone / ".git"):
        message = refused(folder, "HEAD~1")
        assert "submodule 'lib' of commit HEAD~1" in message
        assert "submodule update --init" in message


def test_variables_of_a_hook_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab, other = lab_of(tmp_path / "lab", {"a": "1"}, {"a": "2"}), lab_of(tmp_path / "other", {"b": "1"})
    expected = pack_commit(lab, "HEAD~1").tree, pack_code(lab).tree
    shutil.copy(other / ".git/index", tmp_path / "index")
    listed = git(lab, "rev-parse", "--local-env-vars").split()
    values = {
        "GIT_DIR": other / ".git",
        "GIT_WORK_TREE": other,
        "GIT_INDEX_FILE": tmp_path / "index",
        "GIT_PREFIX": "x/",
    }
    for name in {*listed, "GIT_NAMESPACE", "GIT_CEILING_DIRECTORIES", "GIT_ICASE_PATHSPECS"} - {"GIT_CONFIG_COUNT"}:
        monkeypatch.setenv(name, str(values.get(name, tmp_path)))
    assert (pack_commit(lab, "HEAD~1").tree, pack_code(lab).tree) == expected


def test_no_hook_runs_and_neither_a_lock_nor_a_change_of_the_index_matters(tmp_path: Path) -> None:
    lab = lab_of(tmp_path / "lab", {"a": "1"}, {"a": "2"})
    for name in ("post-checkout", "post-index-change", "fsmonitor-watchman", "reference-transaction"):
        (lab / ".git/hooks" / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
        (lab / ".git/hooks" / name).chmod(0o755)
    git(lab, "config", "core.fsmonitor", str(lab / ".git/hooks/fsmonitor-watchman"))
    (tmp_path / "ran").unlink(missing_ok=True)
    (lab / ".git/index.lock").write_text("")
    before = (lab / ".git/index").read_bytes()
    os.utime(lab / "a", (1, 1))
    assert len({pack_commit(lab, "HEAD~1").tree, pack_commit(lab, "HEAD").tree, pack_code(lab).tree}) == 2
    assert not (tmp_path / "ran").exists()
    assert (lab / ".git/index").read_bytes() == before


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize {{size}}\n"


def test_a_pointer_of_git_lfs_is_its_content_or_as_in_the_work_tree(
    tmp_path: Path, settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = POINTER.format(size=5), POINTER.format(size=6)
    lab = lab_of(tmp_path / "lab", {".gitattributes": "*.bin filter=lfs", "a.bin": older}, {"a.bin": newer})
    assert pack_commit(lab, "HEAD").tree == pack_code(lab).tree, "nobody has fetched any content"
    assert "'a.bin' is a pointer of git-lfs" in refused(lab, "HEAD~1")
    assert "a.bin" in refused(lab / ".git")
    program = tmp_path / "bin/git-lfs"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\ntest "$GIT_LFS_SKIP_SMUDGE" = 1 && sed "s/^version.*/content/"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    settings.write_text(
        settings.read_text() + '[filter "lfs"]\nsmudge = git-lfs smudge\nclean = cat\nrequired = true\n'
    )
    assert files_of(pack_commit(lab / ".git", "HEAD~1"), tmp_path / "copy")[b"a.bin"][1].startswith(b"content")
    assert "lfs pull" in refused(lab)
    program.unlink()
    assert "git-lfs smudge" in refused(lab / ".git")
    large = lab_of(tmp_path / "large", {".gitattributes": "*.bin filter=lfs", "a.bin": POINTER.format(size=2**40)})
    with pytest.raises(CodeArchiveError, match=r"1,099,511,627,7\d\d bytes; allowed"):
        pack_commit(large, "HEAD")


def test_a_filter_that_fails_is_named(tmp_path: Path, settings: Path) -> None:
    lab = lab_of(tmp_path / "lab", {".gitattributes": "*.x filter=broken", "a.x": "x"})
    settings.write_text(settings.read_text() + '[filter "broken"]\nsmudge = false\n')
    assert "external filter 'false' failed" in refused(lab)


def test_a_replaced_object_is_refused_and_other_parents_are_not(tmp_path: Path) -> None:
    lab = lab_of(tmp_path / "lab", {"a": "1"}, {"a": "2"}, {"a": "3"})
    git(lab, "replace", "--graft", "HEAD")
    assert pack_commit(lab, "HEAD").tree == pack_code(lab).tree
    git(lab, "replace", "-d", git(lab, "rev-parse", "HEAD"))
    for old, new in (("HEAD", "HEAD~1"), ("HEAD^{tree}", "HEAD~1^{tree}"), ("HEAD:a", "HEAD~1:a")):
        git(lab, "replace", old, new)
        assert "replace -d OBJECT" in refused(lab)
        git(lab, "replace", "-d", git(lab, "--no-replace-objects", "rev-parse", old))


def test_names_of_sha_256_and_every_way_to_name_a_commit(tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    git(tmp_path, "init", "-q", "--object-format=sha256", str(lab))
    lab_of(lab, {"sub/a": "1", "b": "x"}, {"sub/a": "2"})
    whole = git(lab, "rev-parse", "HEAD~1")
    assert len(whole) == 64
    for name in (whole, whole[:9], "main~1", "HEAD^", "@{1}"):
        assert pack_commit(lab, name).commit == whole
    assert len({pack_commit(lab / "sub", name).tree for name in (whole, "HEAD")}) == 2


def partial(lab: Path, clone: Path) -> Path:
    git(lab, "config", "uploadpack.allowFilter", "true")
    git(lab.parent, "clone", "-q", "--filter=blob:none", f"file://{lab}", str(clone))
    return clone


def treeless(lab: Path, clone: Path) -> Path:
    git(lab, "config", "uploadpack.allowFilter", "true")
    git(lab.parent, "clone", "-q", "--filter=tree:0", f"file://{lab}", str(clone))
    return clone


def shallow(lab: Path, clone: Path) -> Path:
    git(lab.parent, "clone", "-q", "--depth=1", f"file://{lab}", str(clone))
    return clone


def damaged(lab: Path, clone: Path) -> Path:
    name = git(lab, "rev-parse", "HEAD~1:a")
    shutil.copytree(lab, clone)
    (clone / ".git/objects" / name[:2] / name[2:]).unlink()
    return clone


def unborn(lab: Path, clone: Path) -> Path:
    git(lab.parent, "init", "-q", str(clone))
    return clone


def later_folder(lab: Path, _clone: Path) -> Path:
    return lab / "sub"


def broken_link(lab: Path, clone: Path) -> Path:
    git(lab, "worktree", "add", "-q", str(clone))
    shutil.rmtree(lab / ".git/worktrees")
    return clone


def plain(lab: Path, clone: Path) -> Path:
    clone.mkdir()
    return clone


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (partial, ("partial clone", "fetch --refetch --no-filter")),
        (treeless, ("partial clone", "fetch --refetch --no-filter")),
        (shallow, ("no commit 'HEAD~1'", "shallow clone", "fetch --unshallow")),
        (damaged, ("content of 'a'", "fsck")),
        (unborn, ("no commit 'HEAD~1'", "commit`")),
        (later_folder, ("commit HEAD~1", "no folder 'sub/'", "log --oneline -- .")),
        (broken_link, ("in no git repository", "repaired or removed")),
        (plain, ("in no git repository",)),
    ],
)
def test_a_clone_that_lacks_something_says_what_and_what_to_type(
    tmp_path: Path, state: Callable[[Path, Path], Path], words: tuple[str, ...]
) -> None:
    lab = lab_of(tmp_path / "lab", {"a": "1"}, {"a": "2", "sub/b": "3"})
    folder = state(lab, tmp_path / "clone")
    message = refused(folder, "HEAD~1")
    assert [word for word in words if word not in message] == []
    command = re.search("type `(git -C [^`]*(?:fetch|fsck)[^`]*)`", message)
    if command is not None and state is not damaged:
        subprocess.run(shlex.split(command[1]), check=True, capture_output=True)
        assert pack_commit(folder, "HEAD~1").tree == pack_commit(lab, "HEAD~1").tree


def test_unknown_and_ambiguous_revisions_are_quoted(tmp_path: Path) -> None:
    lab = lab_of(tmp_path / "lab", {"a": "1"})
    for name in ("nobranch", "0123456", "HEAD~9", "HEAD:a", "HEAD^{tree}", "main..main", "", "--all", "a b"):
        assert f"no commit {name!r}" in refused(lab, name)


def test_a_repository_of_another_user_is_read_by_nodes_only(
    tmp_path: Path, settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = lab_of(tmp_path / "lab", {"a": "1"})
    tree = pack_commit(lab, "HEAD").tree
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    message = refused(lab)
    assert "another user" in message
    assert f"git config --global --add safe.directory {lab}" in message
    with pytest.raises(CodeArchiveError, match="another user"):
        pack_code(lab)
    settings.write_text("[closed to an isolated trial")
    write_commit(lab, "HEAD", tmp_path / "copy", any_owner=True)
    assert tree_digest(tmp_path / "copy") == tree


def test_without_git_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = lab_of(tmp_path / "lab", {"a": "1"})
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "env").symlink_to(str(shutil.which("env")))
    monkeypatch.setenv("PATH", str(programs))
    assert refused(lab).endswith("git is not installed here; install git")
