import os
import socket
from pathlib import Path

import pytest

from service.errors import StackBusy, StackError
from service.stack.layout import MAX_SOCKET_BYTES, StackFiles
from service.stack.parts import LOOPBACK, free_port
from service.stack.state import StackState, exclusive, is_locked, read_state, write_state

STATE = StackState(
    stack_id="abc",
    phase="ready",
    api_url="http://127.0.0.1:1",
    mlflow_url="http://127.0.0.1:2",
    ablations_url="http://127.0.0.1:2/#/experiments",
    broker_url="redis+socket:///x",
    supervisor_pid=1,
    started_at="2026-11-20T00:00:00+00:00",
)


def test_broker_socket_stays_in_a_short_home() -> None:
    assert StackFiles(home=Path("/srv/ablate")).broker_socket == Path("/srv/ablate/run/valkey.sock")


@pytest.mark.parametrize("home", ["/srv/" + "x" * 120, "/srv/with space", "/srv/ümlaut"])
def test_broker_socket_moves_when_the_home_is_long_or_odd(home: str) -> None:
    path = StackFiles(home=Path(home)).broker_socket
    assert len(os.fsencode(path)) <= MAX_SOCKET_BYTES
    assert not path.is_relative_to(home)
    assert path == StackFiles(home=Path(home)).broker_socket
    assert path != StackFiles(home=Path(home + "2")).broker_socket


@pytest.mark.parametrize("sign", "?#%")
def test_stack_files_refuse_a_home_that_breaks_urls(sign: str) -> None:
    with pytest.raises(StackError, match=r"database URL cannot contain"):
        StackFiles(home=Path(f"/srv/a{sign}b"))


def test_make_folders_keeps_the_short_folder_private_and_remove_runtime_removes_it(tmp_path: Path) -> None:
    files = StackFiles(home=tmp_path / ("y" * 120))
    files.make_folders()
    private = files.broker_socket.parent
    assert private.stat().st_mode & 0o777 == 0o700
    files.remove_runtime()
    assert not private.exists()
    assert files.lock.parent.is_dir()


def test_state_survives_writing_and_reading_and_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    files = StackFiles(home=tmp_path)
    assert read_state(files) is None
    write_state(files, STATE)
    assert read_state(files) == STATE
    files.state.write_text("{")
    with pytest.raises(StackError, match=r"stack\.json is damaged"):
        read_state(files)


def test_exclusive_lets_one_in_and_frees_the_home_afterwards(tmp_path: Path) -> None:
    files = StackFiles(home=tmp_path)
    assert not is_locked(files)
    with exclusive(files):
        assert is_locked(files)
        with pytest.raises(StackBusy), exclusive(files):
            pass
    assert not is_locked(files)


def test_free_port_skips_ports_in_use_and_ports_of_other_parts() -> None:
    with socket.create_server((LOOPBACK, 0)) as other:
        in_use = other.getsockname()[1]
        free = free_port(in_use)
        assert free > in_use
        assert free_port(in_use, taken=frozenset({free})) > free
