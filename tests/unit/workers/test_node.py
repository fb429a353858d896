import os
import subprocess
from dataclasses import replace
from pathlib import Path

from ablate.experiments.digest import CODE_PACKAGES, code_digest
from ablate.workers.node import find_node, read_code


def _checkout(root: Path) -> Path:
    for package in CODE_PACKAGES:
        (root / package).mkdir()
        (root / package / "a.py").write_text("x = 1\n")
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.email=a@b", "-c", "user.name=n", "commit", "-q", "-m", "start"],
    ):
        subprocess.run(["git", "-C", str(root), *command], check=True)
    return root.resolve()


def test_read_code_clean_checkout(tmp_path: Path) -> None:
    state = read_code(_checkout(tmp_path))
    assert state.git_commit is not None
    assert len(state.git_commit) == 40
    assert state.git_dirty_digest is None


def test_read_code_dirty_checkout_digests_the_patch(tmp_path: Path) -> None:
    root = _checkout(tmp_path)
    clean = read_code(root)
    (root / "model" / "a.py").write_text("x = 2\n")
    two = read_code(root)
    (root / "model" / "a.py").write_text("x = 3\n")
    three = read_code(root)
    assert len({clean.digest, two.digest, three.digest}) == 3
    assert len({None, two.git_dirty_digest, three.git_dirty_digest}) == 3


def test_read_code_folder_inside_a_foreign_checkout(tmp_path: Path) -> None:
    _checkout(tmp_path)
    assert read_code(tmp_path.resolve() / "model").git_commit is None


def test_changed_names_the_software_that_is_other_than_at_the_start() -> None:
    node = find_node("here", "cpu")
    assert node.changed() is None
    other = replace(node, code=replace(node.code, digest="sha256:earlier"))
    assert other.changed() == "the source code changed after this worker had started; start it again"
    older = replace(node, versions={**node.versions, "torch": "1.0"})
    assert str(older.changed()).startswith(f"torch changed from 1.0 to {node.versions['torch']} after this worker")
    without = replace(node, versions={name: node.versions[name] for name in node.versions if name != "numpy"})
    assert str(without.changed()).startswith("numpy changed from absent to ")


def test_a_node_registers_the_cores_that_it_may_use() -> None:
    assert find_node("here", "cpu").registration(None).cores == len(os.sched_getaffinity(0))


def test_kernels_of_other_versions_are_in_another_folder(tmp_path: Path) -> None:
    node = find_node("here", "cpu")
    newer = replace(node, versions={**node.versions, "nvcc": "99.0"})
    assert node.kernels(tmp_path) == find_node("there", "cpu").kernels(tmp_path) != newer.kernels(tmp_path)


def test_code_digest_sees_names_and_ignores_other_files(tmp_path: Path) -> None:
    root = _checkout(tmp_path)
    before = code_digest(root)
    (root / "model" / "notes.txt").write_text("nothing")
    assert code_digest(root) == before
    (root / "model" / "a.py").rename(root / "model" / "b.py")
    assert code_digest(root) != before
