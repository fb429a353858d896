import os
import random
import re
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from ablate.experiments.records.code_archive import pack_code
from ablate.service.errors import StackBusy, StackError
from ablate.service.stack import broker, control, part_processes, supervisor
from ablate.service.stack.layout import MAX_SOCKET_BYTES, StackFiles
from ablate.service.stack.parts import LOOPBACK, check_installed, free_port
from ablate.service.stack.state import StackState, exclusive, is_locked, read_state, write_state
from ablate.service.stack.supervisor import check_databases
from tests.waiting import LIMIT_S

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

GARBAGE = b"\xff\x00 garbage" * 400


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
    files.make_folders()
    private = files.broker_socket.parent
    assert private.stat().st_mode & 0o777 == 0o700
    files.remove_runtime()
    assert not private.exists()
    assert files.lock.parent.is_dir()


def test_state_survives_writing_and_reading_and_a_damaged_file_is_refused(tmp_path: Path) -> None:
    files = StackFiles(home=tmp_path)
    assert read_state(files) is None
    write_state(files, STATE)
    assert read_state(files) == STATE
    for damage in ("{", "", "\0" * 100, "[]"):
        files.state.write_text(damage)
        with pytest.raises(
            StackError, match=r"stack\.json cannot be read: it is damaged; remove it, then run: ablate up"
        ):
            read_state(files)
        with pytest.raises(StackError, match=r"stack\.json cannot be read"):
            control.start(files, silent)
        assert files.state.read_text() == damage
    files.state.unlink()
    files.state.mkdir()
    with pytest.raises(StackError, match=r"stack\.json cannot be read: Is a directory; remove it"):
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


FOLDERS = ["run", "logs", "mlflow", "data", "work", "reports", "tokens"]
FILES = ["run/stack.lock", "run/valkey.conf", "run/valkey.sock", "logs/valkey.log"]
DUMP = "run/dump.rdb"


@pytest.mark.parametrize("name", [*FOLDERS, *FILES, DUMP])
def test_what_is_in_the_way_of_the_stack_is_refused_by_name_and_stays(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    if name in FILES:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(GARBAGE)
    problem = {DUMP: "is not from this stack, and the broker would load it"}.get(
        name, f"is no {'file' if name in FILES else 'folder'} that this user can write to"
    )
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StackError) as refusal:
        StackFiles(home=tmp_path).make_folders()
    assert str(refusal.value) == f"{tmp_path / name} {problem}; remove it, then run: ablate up"
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", FILES)
def test_what_a_killed_stack_leaves_is_used_again_whatever_it_holds(tmp_path: Path, name: str) -> None:
    files = StackFiles(home=tmp_path)
    files.make_folders()
    (tmp_path / name).write_bytes(GARBAGE)
    files.make_folders()
    with exclusive(files):
        broker.configure(files, host=LOOPBACK, port=None)
        assert "unixsocket" in files.broker_config.read_text()
        write_state(files, STATE)
        files.remove_runtime()
    assert not files.state.exists()
    assert not files.broker_socket.exists()


def test_a_stale_state_of_a_killed_supervisor_is_removed_with_its_processes(tmp_path: Path) -> None:
    files = StackFiles(home=tmp_path)
    files.make_folders()
    environment = part_processes.stack_mark(STATE.stack_id).environment
    orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=environment)
    write_state(files, STATE)
    try:
        notes: list[str] = []
        control.clean_stale(files, lambda _kind, text: notes.append(text))
        assert orphan.wait(LIMIT_S) == -signal.SIGTERM
        assert notes == [f"ended 1 processes of the stack of {STATE.started_at}, whose supervisor had died"]
        assert not files.state.exists()
    finally:
        orphan.kill()
        orphan.wait()


def _database(path: Path, *, journal: str = "wal") -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA journal_mode={journal}")
        connection.execute("CREATE TABLE runs (id, name)")
        connection.execute("CREATE INDEX names ON runs (name)")
        connection.executemany("INSERT INTO runs VALUES (?, ?)", [(place, "x" * 500) for place in range(200)])
        connection.commit()


RESTORE = "restore a file from `ablate admin backup`: ablate admin restore FILE"
REBUILD = "remove {}, then run: ablate up, ablate admin mlflow rebuild"


def _garble(path: Path) -> None:
    path.write_bytes(GARBAGE)


def _cut(path: Path) -> None:
    _database(path)
    os.truncate(path, path.stat().st_size // 2)


def _folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("damage", [_garble, _cut, _folder])
@pytest.mark.parametrize("name", ["ablate.db", "mlflow/mlflow.db"])
def test_a_damaged_database_is_refused_with_its_remedy(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    files = StackFiles(home=tmp_path)
    files.make_folders()
    damage(tmp_path / name)
    before = (tmp_path / name).read_bytes() if damage is not _folder else b""
    remedy = RESTORE if name == "ablate.db" else REBUILD.format(files.mlflow)
    with pytest.raises(StackError, match=re.escape(f"{tmp_path / name} cannot be used: ")) as refusal:
        check_databases(files)
    assert str(refusal.value).endswith(f"; if it is damaged, {remedy}")
    assert damage is _folder or (tmp_path / name).read_bytes() == before


@pytest.mark.parametrize("journal", ["wal", "delete"])
def test_a_database_whose_writer_was_killed_is_used(tmp_path: Path, journal: str) -> None:
    files = StackFiles(home=tmp_path)
    files.make_folders()
    check_databases(files)
    for database in (files.database, files.mlflow_database):
        _database(database, journal=journal)
        code = (
            "import os, signal, sqlite3, sys; writer = sqlite3.connect(sys.argv[1], isolation_level=None);"
            "writer.execute('PRAGMA cache_size=2'); writer.execute('BEGIN');"
            "writer.executemany('INSERT INTO runs VALUES (?, ?)', [(n, 'y' * 3000) for n in range(400)]);"
            "os.kill(os.getpid(), signal.SIGKILL)"
        )
        subprocess.run([sys.executable, "-c", code, str(database)], check=False)
        assert [*database.parent.glob(f"{database.name}-*")], "a journal is left"
    check_databases(files)
    for database in (files.database, files.mlflow_database):
        with closing(sqlite3.connect(database)) as connection:
            assert connection.execute("SELECT count(*) FROM runs").fetchone() == (200,)


@pytest.mark.parametrize("seed", range(60))
def test_random_damage_is_refused_wherever_a_reader_meets_it(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    files = StackFiles(home=tmp_path)
    files.make_folders()
    _database(files.database)
    data = bytearray(files.database.read_bytes())
    for _ in range(chance.randint(1, 4)):
        place, length = chance.randrange(len(data)), chance.choice([1, 4, 100, 5000])
        data[place : place + length] = chance.randbytes(len(data[place : place + length]))
    files.database.write_bytes(data)
    if supervisor._problem(files.database) is None:
        with closing(sqlite3.connect(files.database)) as connection:
            connection.execute("SELECT id FROM runs NOT INDEXED").fetchall()
    else:
        with pytest.raises(StackError, match=re.escape(f"{files.database} cannot be used: ")):
            check_databases(files)
        assert files.database.read_bytes() == data


def test_the_broker_keeps_nothing_on_disk(tmp_path: Path) -> None:
    files = StackFiles(home=tmp_path)
    files.make_folders()
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
    monkeypatch.setattr("ablate.experiments.system.processes._SHORT_FOLDERS", ("/no/such/folder",))
    with pytest.raises(OSError, match="set TMPDIR to a folder with a path of at most 56 bytes"):
        _ = StackFiles(home=tmp_path / ("y" * 120)).broker_socket


def test_stack_without_a_worker_needs_no_package_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in ("torch", "tokenizers") else name)
    check_installed(with_worker=False)
    with pytest.raises(StackError, match=r"not installed: torch \(the worker\), tokenizers \(the worker\); run `make"):
        check_installed(with_worker=True)


def test_git_sees_nothing_of_a_new_home_and_a_folder_of_the_user_gets_no_file(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "train.py").write_text("pass")
    before = pack_code(tmp_path).tree
    StackFiles(home=tmp_path / "state").make_folders()
    (tmp_path / "state" / "ablate.db").write_text("x")
    shown = subprocess.run(["git", "status", "--short"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert shown.stdout == "?? train.py\n"
    assert pack_code(tmp_path).tree == before
    own = tmp_path / "own"
    own.mkdir()
    StackFiles(home=own).make_folders()
    assert not (own / ".gitignore").exists()
