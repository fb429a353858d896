"""Files of a trial in /dev/shm: which ones count, and which ones go at its end."""

import mmap
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate.workers.paths import SharedMemory

TRIAL, OTHER = 1, 2
FILE = st.fixed_dictionaries({"before": st.booleans(), "trial": st.booleans(), "other": st.booleans()})


@given(files=st.lists(FILE, max_size=8))
def test_only_new_files_of_the_trial_that_nobody_else_uses_go(files: list[dict[str, bool]]) -> None:
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        paths = {folder / str(number): file for number, file in enumerate(files)}
        for path, file in paths.items():
            if file["before"]:
                path.write_bytes(b"x")
        memory = SharedMemory(folder)
        for path in paths:
            path.write_bytes(b"x" * 5000)
        users = {
            TRIAL: [path for path, file in paths.items() if file["trial"]],
            OTHER: [path for path, file in paths.items() if file["other"]],
        }
        patch.setattr("ablate.workers.paths._open_files", lambda pid: iter([*users[pid], Path("/usr/lib/x.so")]))
        patch.setattr("ablate.workers.paths.process_numbers", lambda: [OTHER])
        own = {path for path, file in paths.items() if file["trial"] and not file["before"]}
        assert memory.look([TRIAL]) == sum(path.stat().st_blocks * 512 for path in own)
        memory.sweep()
        assert set(folder.iterdir()) == {path for path, file in paths.items() if path not in own or file["other"]}


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_a_file_that_a_process_uses_is_seen(tmp_path: Path, how: str) -> None:
    memory = SharedMemory(tmp_path)
    path = tmp_path / "of this process"
    path.write_bytes(bytes(8192))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        if how == "mapped":
            os.close(os.dup(file.fileno()))
        assert memory.look([os.getpid()]) == path.stat().st_blocks * 512
    assert memory.look([]) > 0, "it is remembered when its process has closed it"
    memory.sweep()
    assert not path.exists()
