"""Drawn file trees: what a process changes there, and which sockets it reaches, beside a plain statement of both."""

import json
import os
import shutil
import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ablate.experiments.system.own_tree import OwnTree
from ablate.workers.isolation.reach import own_tree_problem

pytestmark = pytest.mark.skipif(own_tree_problem() is not None, reason=f"no tree here: {own_tree_problem()}")

FOLDERS = [
    Path(*parts) for parts in (("a",), ("a", "b"), ("a", "b", "c"), ("a b",), ("a b", "\u00fc"), ("d",), ("d", "a"))
]


@settings(max_examples=40, deadline=None)
@given(
    writable=st.sets(st.sampled_from(FOLDERS), max_size=4),
    sockets=st.sets(st.sampled_from(FOLDERS)),
    inside=st.sampled_from(FOLDERS),
)
def test_a_process_changes_its_folders_only_and_reaches_no_socket_that_was_there(
    writable: set[Path], sockets: set[Path], inside: Path
) -> None:
    root = Path(tempfile.mkdtemp(prefix="tree-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, root)
        for folder in FOLDERS:
            (root / folder).mkdir(parents=True)
            (root / folder / "file").touch(mode=0o600)
        for folder in sockets:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(root / folder / "socket"))
            listener.listen()
        changed, reached, left = _answers(root, tuple(root / folder for folder in writable), root / inside)
        modes = {str(folder): (root / folder / "file").stat().st_mode & 0o777 for folder in FOLDERS}
    expected = {str(folder) for folder in FOLDERS if any(folder.is_relative_to(one) for one in writable)}
    assert set(changed) == expected
    assert {name for name, mode in modes.items() if mode == 0o644} == expected, "the machine's files"
    assert reached == []
    assert left == ["own"], "in its /dev/shm"
    assert not Path("/dev/shm/own").exists()  # noqa: S108 - what the process made


def _answers(root: Path, writable: tuple[Path, ...], inside: Path) -> tuple[list[str], list[str], list[str]]:
    """Return the folders that a process in a tree changes, those whose socket it reaches, and its shared memory."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.chdir(inside)
            OwnTree(writable=tuple(path.resolve() for path in writable), readable=()).enter()
            changed = [str(folder) for folder in FOLDERS if _changes(root / folder / "file")]
            reached = [str(folder) for folder in FOLDERS if _reaches(folder, root, inside)]
            Path("/dev/shm/own").touch()  # noqa: S108
            os.write(writer, json.dumps([changed, reached, os.listdir("/dev/shm")]).encode())  # noqa: PTH208, S108
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        text = answer.read()
    os.waitpid(child, 0)
    changed, reached, left = json.loads(text)
    return changed, reached, left


def _changes(file: Path) -> bool:
    try:
        file.chmod(0o644)
    except OSError:
        return False
    return True


def _reaches(folder: Path, root: Path, inside: Path) -> bool:
    """Return whether a socket answers, by its whole name or from the current folder."""
    for name in (root / folder / "socket", os.path.relpath(root / folder / "socket", inside)):
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(name))
            except OSError:
                continue
            return True
    return False
