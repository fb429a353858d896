"""What the service says about itself: what works, what does not, and that asking costs nobody else anything."""

import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.engine import make_url

from ablate.service.background.leader import Leader
from ablate.service.background.main import duties
from ablate.service.lifecycle import OutboxKind
from ablate.service.store import leaders, outbox
from tests.api_stack import Api, running_api, served_api, settings_for
from tests.factories import spec_values
from tests.waiting import LIMIT_S, until

CALLERS = 60


@contextmanager
def _frozen_server() -> Iterator[int]:
    """A port that takes connections and never says a word, as a stopped process does."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(200)
        yield listener.getsockname()[1]


def _readiness(api: Api) -> dict[str, Any]:
    answer = api.client.get("/readyz")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_what_is_away_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    with running_api("sqlite", tmp_path) as api:
        readiness = _readiness(api)
        assert (readiness["ready"], readiness["degraded"]) == (True, ["background", "broker", "mlflow"])
        detail = readiness["checks"]["background"]["detail"]
        assert "no background process leads" in detail
        assert readiness["checks"]["database"] == {"ok": True, "detail": "sqlite"}
        assert api.submit()["state"] == "queued"
        metrics = api.client.get("/metrics").text
    up = {line.split()[0]: float(line.split()[1]) for line in metrics.splitlines() if line.startswith("ablate_dep")}
    assert up == {
        f'ablate_dependency_up{{dependency="{name}"}}': float(name in ("database", "writes", "projection"))
        for name in ("database", "writes", "background", "broker", "mlflow", "projection")
    }
    assert 'ablate_duty_held{duty="judge"} 0.0' in metrics


Plant = Callable[[Api], AbstractContextManager[object]]


def _lapsed_lease(api: Api) -> AbstractContextManager[object]:
    with api.store.write() as connection:
        connection.execute(text("UPDATE leaders SET until = 0"))
    return nullcontext()


def _full_disk(api: Api) -> AbstractContextManager[object]:
    """Reject what writes a page; a trigger does it without a disk of its own."""
    with api.store.write() as connection:
        for word in ("INSERT", "UPDATE"):
            full = "BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END"
            connection.execute(text(f"CREATE TRIGGER full_{word} BEFORE {word} ON leaders {full}"))
    return nullcontext()


def _failed_projection(api: Api) -> AbstractContextManager[object]:
    with api.store.write() as connection:
        outbox.add(connection, OutboxKind.PROJECT, "abl_x", tries=1)
        connection.execute(text("UPDATE outbox SET last_error = 'MLflow is away'"))
    return nullcontext()


def _damaged_page(api: Api) -> AbstractContextManager[object]:
    with api.store.write() as connection:
        leaders.write_mark(connection, "earlier")
    path = str(make_url(api.store.url).database)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'leaders'").fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    api.store.reader.dispose()  # a cached page would be read on
    api.store.writer.dispose()
    with Path(path).open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)
    return nullcontext()


@contextmanager
def _silent_writer(api: Api) -> Iterator[None]:
    """Another process keeps the lock of the database."""
    with closing(sqlite3.connect(str(make_url(api.store.url).database), isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield


@pytest.mark.parametrize(
    ("plant", "failed", "words"),
    [
        (nullcontext, set(), ""),
        (_lapsed_lease, {"background"}, "no background process leads"),
        (_full_disk, {"writes"}, "disk is full"),
        (_failed_projection, {"projection"}, "MLflow is away"),
        (_silent_writer, {"writes"}, "no answer for 3 s"),
        (_damaged_page, {"database", "writes", "background"}, "malformed"),
    ],
)
def test_readiness_names_exactly_what_is_wrong(tmp_path: Path, plant: Plant, failed: set[str], words: str) -> None:
    with running_api("sqlite", tmp_path, projector_lease_s=600) as api:
        assert leaders.take_lease(api.store, "somebody", lease_s=600)
        with plant(api):
            answer = api.client.get("/readyz")
    if answer.status_code == 503:
        reasons = {error["pointer"].removeprefix("#/checks/"): error["detail"] for error in answer.json()["errors"]}
    else:
        reasons = {name: check["detail"] for name, check in answer.json()["checks"].items() if not check["ok"]}
        assert set(reasons) == set(answer.json()["degraded"])
    assert set(reasons) - {"broker", "mlflow"} == failed
    assert (answer.status_code == 503) == ("database" in failed)
    assert all(words in reasons[name] for name in failed)


def test_a_check_that_cannot_read_what_it_wrote_fails(tmp_path: Path) -> None:
    with running_api("sqlite", tmp_path) as api:
        with api.store.write() as connection:
            lost = "BEGIN UPDATE leaders SET holder = 'old' WHERE duty = NEW.duty; END"
            connection.execute(text(f"CREATE TRIGGER lost AFTER INSERT ON leaders {lost}"))
        assert "returned 'old'" in _readiness(api)["checks"]["writes"]["detail"]


def test_the_duties_in_the_metrics_are_those_of_the_leader(tmp_path: Path) -> None:
    with running_api("sqlite", tmp_path) as api:
        leader = Leader(api.store, lease_s=5)
        threads = duties(settings_for(api.store.url, tmp_path), leader, api.store, stop=threading.Event())
    assert {thread.name for thread in threads} == set(leaders.DUTIES)


@pytest.mark.slow
def test_frozen_parts_and_many_strangers_hold_nobody_up(tmp_path: Path) -> None:
    """60 callers without a token on every open page, broker and MLflow frozen: work goes on, nothing piles up."""
    with _frozen_server() as broker, _frozen_server() as mlflow:
        urls = {"broker_url": f"redis://127.0.0.1:{broker}/0", "mlflow_url": f"http://127.0.0.1:{mlflow}"}
        with served_api("sqlite", tmp_path, **urls) as api, ThreadPoolExecutor(CALLERS) as pool:
            base, stop = str(api.client.base_url), threading.Event()

            def stranger(number: int) -> set[int]:
                paths = ["/readyz", "/metrics", "/version", "/v1/schema/ablation.json", "/v1/ablations"]
                seen = set()
                with httpx.Client(base_url=base, trust_env=False, timeout=LIMIT_S) as client:
                    for turn in count():
                        if stop.is_set():
                            return seen
                        token = {"Authorization": f"Bearer nobody-{number}-{turn}"}
                        seen.add(client.get(paths[number % len(paths)], headers=token).status_code)
                return seen

            callers = [pool.submit(stranger, number) for number in range(CALLERS)]
            node = api.register()
            for number in range(12):
                assert api.submit(ablation=f"goes-on-{number}")["state"] == "queued"
                assert api.claim(node) is not None or number
            probes = [thread.name for thread in threading.enumerate() if thread.name.startswith("probe-")]
            stop.set()
            seen = set().union(*(caller.result() for caller in callers))
            readiness = _readiness(api)
    assert seen <= {200, 401}
    assert len(probes) == len(set(probes)), "a check that hangs was asked again"
    assert {"broker", "mlflow"} <= set(readiness["degraded"])


def test_strangers_share_the_work_that_they_ask_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ablate.service.http.readiness.FRESH_S", 10_000.0)
    with served_api("sqlite", tmp_path) as api, ThreadPoolExecutor(CALLERS) as pool:
        statements: Counter[str] = Counter()
        for engine in (api.store.reader, api.store.writer):
            event.listen(engine, "before_cursor_execute", lambda *args: statements.update([args[2]]))

        def ask(path: str) -> None:
            assert httpx.get(f"{api.client.base_url}{path}", trust_env=False, timeout=LIMIT_S).status_code == 200

        list(pool.map(ask, ["/readyz", "/metrics"] * 2 * CALLERS))
    assert max(statements.values()) < CALLERS, "each asked for itself"


def test_readyz_is_503_only_while_the_database_cannot_be_read(tmp_path: Path) -> None:
    with running_api("postgresql", tmp_path) as api:
        name = make_url(api.store.url).database
        assert "writes" not in _readiness(api)["degraded"]
        _as_administrator(api, f"ALTER DATABASE {name} ALLOW_CONNECTIONS false", name)
        until(lambda: api.client.get("/readyz").status_code == 503)
        problem = api.client.get("/readyz").json()
        assert problem["type"].endswith("unavailable")
        assert "#/checks/database" in {error["pointer"] for error in problem["errors"]}
        assert 'ablate_dependency_up{dependency="database"} 0.0' in api.client.get("/metrics").text
        _as_administrator(api, f"ALTER DATABASE {name} ALLOW_CONNECTIONS true", None)
        until(lambda: api.client.get("/readyz").status_code == 200)


def _as_administrator(api: Api, statement: str, ended: str | None) -> None:
    """Run a statement in the server's own database, then end every connection to the database `ended`.

    Waits until they are gone: one that was only told to end passes for open, and fails in the middle of its next use.
    """
    engine = create_engine(make_url(api.store.url).set(database="postgres"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(statement))
        if ended:
            end = "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE datname = :name"
            assert all(connection.execute(text(end), {"name": ended}).scalars()), "a connection did not end"
    engine.dispose()


def test_postgresql_that_only_reads_for_a_while_is_written_to_again(tmp_path: Path) -> None:
    """Connections that were opened meanwhile keep the setting for ever; they must not be used again."""
    with running_api("postgresql", tmp_path) as api:
        name, made = make_url(api.store.url).database, api.submit()
        _as_administrator(api, f"ALTER DATABASE {name} SET default_transaction_read_only = on", name)
        answers = [api.post_spec(_spec(), key=f"ro-{number}") for number in range(4)]
        assert {answer.status_code for answer in answers} == {503}
        assert "takes no changes now" in answers[0].json()["detail"]
        until(lambda: "writes" in _readiness(api)["degraded"])
        assert api.get(made["links"]["self"]).status_code == 200
        _as_administrator(api, f"ALTER DATABASE {name} RESET default_transaction_read_only", None)
        until(lambda: "writes" not in _readiness(api)["degraded"])
        again = [api.post_spec(_spec(), key=f"rw-{number}").status_code for number in range(30)]
    assert again.count(503) <= 3, "a connection from the spell that only read until now fails once"
    assert again[10:] == [202] * 20


def _spec() -> dict[str, Any]:
    return dict(spec_values())


SPELL = """
    import os, sys
    from pathlib import Path
    from sqlalchemy import text
    from sqlalchemy.exc import OperationalError
    from ablate.service.store.session import Store, is_read_only

    folder, user = Path(sys.argv[1]), int(sys.argv[2])
    warm = Store(f"sqlite:///{folder}/warm.db")  # loads every module while this may read them
    with warm.write() as connection:
        connection.execute(text("SELECT 1"))
    warm.close()
    for one in folder.iterdir():
        one.unlink()
    if os.geteuid() == 0:
        os.setuid(user)
    path = folder / "spell.db"
    store = Store(f"sqlite:///{path}")
    assert oct(path.stat().st_mode)[-3:] == "600", oct(path.stat().st_mode)

    def write(value):
        with store.write() as connection:
            connection.execute(text("INSERT INTO t VALUES (:value)"), {"value": value})

    with store.write() as connection:
        connection.execute(text("CREATE TABLE t (x INTEGER)"))
    write(1)
    modes = {one: one.stat().st_mode for one in folder.iterdir()}
    assert all(oct(mode)[-3:] == "600" for mode in modes.values()), modes
    store.close()  # as after an error: the next connection is opened during the spell
    for one in folder.iterdir():
        one.chmod(0o400)
    folder.chmod(0o500)
    for _ in range(3):
        try:
            write(2)
        except OperationalError as error:
            assert is_read_only(error.orig) or "unable to open" in str(error), error
        else:
            raise AssertionError("written to a database that only reads")
    folder.chmod(0o700)
    for one in folder.iterdir():
        one.chmod(0o600)
    for value in range(3, 13):
        write(value)
    with store.read() as connection:
        assert connection.execute(text("SELECT count(*) FROM t")).scalar_one() == 11
    print("well")
"""


def test_sqlite_that_only_reads_for_a_while_is_written_to_again() -> None:
    """As an ordinary user: root may write to everything."""
    folder = Path(tempfile.mkdtemp(prefix="ablate-spell-"))
    user = 65534 if os.geteuid() == 0 else os.geteuid()
    os.chown(folder, user, -1)
    try:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(SPELL), str(folder), str(user)],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    finally:
        folder.chmod(0o700)
        shutil.rmtree(folder)
    assert done.stdout == "well\n", done.stderr
