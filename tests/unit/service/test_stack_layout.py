import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from service.errors import StackBusy, StackError
from service.stack import broker, control, part_processes
from service.stack.layout import MAX_SOCKET_BYTES, StackFiles
from service.stack.parts import LOOPBACK, check_installed, free_port
from service.stack.state import StackState, exclusive, is_locked, read_state, write_state
from service.stack.supervisor import clear_mlflow
from tests.waiting import LIMIT_S, until

STATE = StackState(
    stack_id="abc",
    phase="ready",
    api_url="http://127.0.0.1:1",
    mlflow_url="http://127.0.0.1:1/mlflow",
    mlflow_port=2,
    ablations_url="http://127.0.0.1:1/mlflow/#/experiments",
    broker_url="redis+socket:///x",
    supervisor_pid=1,
    started_at="2026-11-20T00:00:00+00:00",
)


def silent(_kind: str, _text: str) -> None:
    pass


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
    files.make_folders(silent)
    private = files.broker_socket.parent
    assert private.stat().st_mode & 0o777 == 0o700
    files.remove_runtime()
    assert not private.exists()
    assert files.lock.parent.is_dir()


def test_state_survives_writing_and_reading_and_a_damaged_file_counts_as_absent(tmp_path: Path) -> None:
    files = StackFiles(home=tmp_path)
    assert read_state(files) is None
    write_state(files, STATE)
    assert read_state(files) == STATE
    for damage in ("{", "", "\0" * 100, "[]"):
        files.state.write_text(damage)
        assert read_state(files) is None
    files.state.unlink()
    files.state.mkdir()
    assert read_state(files) is None
    write_state(files, STATE)
    assert read_state(files) == STATE


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


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _garbled(path: Path) -> None:
    path.write_bytes(b"\xff\x00 garbage" * 50)


def _folder(path: Path) -> None:
    (path / "inside").mkdir(parents=True)


MADE_AGAIN = ["run/stack.lock", "run/valkey.conf", "run/valkey.sock", "run/dump.rdb", "run/appendonlydir", "stack.json"]
FOLDERS = ["run", "logs", "mlflow", "data", "work", "reports"]


@pytest.mark.parametrize("damage", [_empty, _garbled, _folder])
@pytest.mark.parametrize("name", [*MADE_AGAIN, "logs/valkey.log"])
def test_a_damaged_file_that_the_stack_makes_again_does_not_stop_it(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    files = StackFiles(home=tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    damage(tmp_path / name)
    control.clean_stale(files, silent)
    files.make_folders(silent)
    with exclusive(files):
        broker.configure(files, host=LOOPBACK, port=None)
        write_state(files, STATE)
        assert read_state(files) == STATE
        assert "unixsocket" in files.broker_config.read_text()
        files.log("valkey").open("ab").close()
        with socket.socket(socket.AF_UNIX) as server:
            files.broker_socket.unlink(missing_ok=True)  # as Valkey does
            server.bind(str(files.broker_socket))
        files.remove_runtime()
    assert not files.state.exists()
    assert not any(path.exists() for path in files.broker_leftovers)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_file_in_the_place_of_a_folder_is_renamed_and_reported(tmp_path: Path, name: str) -> None:
    _garbled(tmp_path / name)
    notes: list[str] = []
    StackFiles(home=tmp_path).make_folders(lambda _kind, text: notes.append(text))
    (aside,) = tmp_path.glob(f"{name}.damaged-*")
    assert aside.read_bytes().endswith(b"garbage")
    assert notes == [f"{tmp_path / name} is no folder that this user can write to; it is now {aside.name}, and the "
                     "stack makes another one"]  # fmt: skip


def test_orphans_end_although_their_stack_json_is_damaged(tmp_path: Path) -> None:
    files = StackFiles(home=tmp_path)
    files.make_folders(silent)
    mark = part_processes.home_mark(files)
    orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=mark.environment)
    files.state.write_text('{"stack_id": ')
    try:
        until(lambda: mark.members() == [orphan.pid])
        notes: list[str] = []
        control.clean_stale(files, lambda _kind, text: notes.append(text))
        assert orphan.wait(LIMIT_S) == -signal.SIGTERM
        assert any("ended 1 processes" in note for note in notes)
    finally:
        orphan.kill()
        orphan.wait()


def _migrating(path: Path) -> None:
    """What a killed MLflow leaves: tables, and no experiment."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE experiments (experiment_id)")
        connection.commit()


def _first_table(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE metrics (key)")
        connection.commit()


@pytest.mark.parametrize("damage", [_empty, _garbled, _folder, _migrating, _first_table, None])
def test_a_damaged_mlflow_database_is_renamed_and_its_contents_are_wanted_again(
    tmp_path: Path, damage: Callable[[Path], None] | None
) -> None:
    files = StackFiles(home=tmp_path)
    files.make_folders(silent)
    assert clear_mlflow(files, silent) is False, "a new home has nothing to project"
    with sqlite3.connect(files.database) as connection:
        connection.execute("CREATE TABLE ablations (id)")
    connection.close()
    with closing(sqlite3.connect(files.mlflow_database)) as connection:
        connection.execute("CREATE TABLE experiments (experiment_id)")
        connection.execute("INSERT INTO experiments VALUES (0)")
        connection.commit()
    assert clear_mlflow(files, silent) is False
    files.mlflow_database.unlink()
    if damage is not None:
        damage(files.mlflow_database)
    assert clear_mlflow(files, silent) is True
    assert len(list(tmp_path.glob("mlflow.damaged-*"))) == int(damage not in (_empty, None))
    assert (files.mlflow / "artifacts").is_dir()
    assert not files.mlflow_database.exists() or not files.mlflow_database.stat().st_size


def test_a_database_cut_in_the_middle_counts_as_damaged(tmp_path: Path) -> None:
    files = StackFiles(home=tmp_path)
    files.make_folders(silent)
    files.database.touch()
    with sqlite3.connect(files.mlflow_database) as connection:
        connection.execute("CREATE TABLE runs (id)")
        connection.executemany("INSERT INTO runs VALUES (?)", [("x" * 500,)] * 200)
    connection.close()
    os.truncate(files.mlflow_database, files.mlflow_database.stat().st_size // 2)
    assert clear_mlflow(files, silent) is True


def test_the_broker_keeps_nothing_on_disk(tmp_path: Path) -> None:
    files = StackFiles(home=tmp_path)
    files.make_folders(silent)
    broker.configure(files, host=LOOPBACK, port=None)
    assert "appendonly no\n" in files.broker_config.read_text()
    assert files.broker_config.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("length", [80, 300])
def test_a_long_temporary_folder_is_not_used_for_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    long = tmp_path / ("t" * 100) / ("u" * length)
    monkeypatch.setattr("tempfile.tempdir", str(long))
    path = StackFiles(home=tmp_path / ("y" * 120)).broker_socket
    assert len(os.fsencode(path)) <= MAX_SOCKET_BYTES
    monkeypatch.setattr("experiments.runtime.processes._SHORT_FOLDERS", ("/no/such/folder",))
    with pytest.raises(OSError, match="set TMPDIR to a folder with a path of at most 56 bytes"):
        _ = StackFiles(home=tmp_path / ("y" * 120)).broker_socket


def test_stack_without_a_worker_needs_no_package_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in ("torch", "tokenizers") else name)
    check_installed(with_worker=False)
    with pytest.raises(StackError, match=r"not installed: torch \(the worker\), tokenizers \(the worker\); run `make"):
        check_installed(with_worker=True)
