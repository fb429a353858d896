"""Sockets that other programs remove while a trial's tree covers them."""

import os
import socket
from pathlib import Path

import pytest

from ablate.experiments.errors import IsolationFailed
from ablate.experiments.system import own_tree


@pytest.mark.parametrize("removed", [True, False])
def test_a_socket_that_its_program_removes_at_the_last_moment_needs_no_cover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, removed: bool
) -> None:
    first, last = tmp_path / "first", tmp_path / "last"
    covered = []

    def mount(name: str, *_arguments: object) -> int:
        path = Path(name.removeprefix("move_mount to "))
        if path == first:
            if removed:
                path.unlink()
            raise IsolationFailed(f"{name}: No such file or directory")
        covered.append(path)
        return 0

    monkeypatch.setattr(own_tree, "_part", lambda path: os.open(path, os.O_PATH))
    monkeypatch.setattr(own_tree, "system_call", mount)
    with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as other:
        one.bind(str(first))
        other.bind(str(last))
        if removed:
            own_tree._hide([first, last])
            assert covered == [last]
        else:
            with pytest.raises(IsolationFailed, match="move_mount"):
                own_tree._hide([first, last])
