"""No call waits for ever: limits on PostgreSQL's answers, locks and open transactions; reads of one moment."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import func, insert, select, text, update
from sqlalchemy.exc import DBAPIError, OperationalError

from ablate.service.store import session
from ablate.service.store.migrate import upgrade
from ablate.service.store.session import Store
from ablate.service.store.tables import ablations, leaders
from tests.api_stack import Api, migrated_url, running_api

ROW = {"duty": "a", "holder": "b", "until": 0.0}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(migrated_url("postgresql", tmp_path))
    yield opened
    opened.close()


def shorten(monkeypatch: pytest.MonkeyPatch, **limits: str) -> None:
    """Shorten these limits of new connections. The others stay long, so that no busy core reaches them first."""
    monkeypatch.setattr(session, "_LIMITS", session._LIMITS | limits)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_reading_sees_the_data_of_one_moment(kind: str, tmp_path: Path) -> None:
    store = Store(migrated_url(kind, tmp_path))
    count = select(func.count()).select_from(leaders)
    with store.read() as reader:
        assert reader.scalar(count) == 0
        with store.write() as writer:
            writer.execute(insert(leaders).values(ROW))
        assert reader.scalar(count) == 0
    with store.read() as reader:
        assert reader.scalar(count) == 1
    store.close()


def test_sqlite_writes_a_commit_to_the_disk(tmp_path: Path) -> None:
    """An accepted submission or report survives a power failure."""
    store = Store(migrated_url("sqlite", tmp_path))
    with store.write() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
    store.close()


def test_silent_server_is_given_up_and_its_connection_replaced(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now = text("SELECT pg_backend_pid()")
    connection = store.writer.connect()
    pid = connection.scalar(now)
    os.kill(pid, signal.SIGSTOP)
    try:
        monkeypatch.setattr(connection.connection.driver_connection, "answer_s", 1.0)
        with pytest.raises(OperationalError, match="no answer from PostgreSQL for 1 s"):
            connection.scalar(now)
        with store.read() as other:
            assert other.scalar(now) != pid
    finally:
        os.kill(pid, signal.SIGCONT)
        connection.close()


def test_silent_pooled_connections_are_replaced_long_before_an_answer_would_be_given_up(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that was replaced leaves connections behind which nobody answers. Readers do not wait for those."""
    now = text("SELECT pg_backend_pid()")
    with store.read() as first, store.read() as second, store.write() as third:
        pids = [connection.scalar(now) for connection in (first, second, third)]
    monkeypatch.setattr(session, "ANSWER_S", 10_000.0)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        with store.read() as connection:
            assert connection.scalar(now) not in pids
        with store.write() as connection:
            assert connection.scalar(now) not in pids
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_long_statement_ends(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, statement_timeout="700ms")
    with pytest.raises(OperationalError, match="statement timeout"), store.read() as connection:
        connection.execute(text("SELECT pg_sleep(30)"))


def test_migration_may_take_longer(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, statement_timeout="700ms")
    with monkeypatch.context() as patched, store.write_for_long() as connection:
        patched.setattr(session._Limited, "answer_s", 1.0)
        connection.execute(text("SELECT pg_sleep(1.2)"))
    with pytest.raises(OperationalError, match="statement timeout"), store.read() as connection:
        connection.execute(text("SELECT pg_sleep(30)"))
    upgrade(store)


def test_nobody_waits_long_for_a_lock(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, lock_timeout="300ms")
    with store.write() as connection:
        connection.execute(insert(leaders).values(ROW))
    with store.writer.connect() as holder:
        holder.execute(update(leaders).values(until=1.0))
        with pytest.raises(OperationalError, match="lock timeout"), store.write() as connection:
            connection.execute(update(leaders).values(until=2.0))


def test_lock_of_a_client_that_went_silent_ends(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, lock_timeout="0", idle_in_transaction_session_timeout="2s")
    with store.write() as connection:
        connection.execute(insert(leaders).values(ROW))
    other = Store(store.url)
    silent = other.writer.connect()
    silent.execute(update(leaders).values(until=1.0))
    with store.write_for_long() as connection:  # waits until the silent one has ended
        assert connection.execute(update(leaders).values(until=3.0)).rowcount == 1
    with pytest.raises(DBAPIError, match="idle-in-transaction"):
        silent.execute(text("SELECT 1"))
    silent.close()
    other.close()


def test_locked_ablation_stops_no_worker_of_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, lock_timeout="1s")
    with running_api("postgresql", tmp_path) as api:
        node, made = api.register(), [api.submit()["id"], api.submit()["id"]]
        claims = [api.claim(node) for _ in made]
        blocks = {block["ablation_id"]: block for block in claims if block is not None}
        with api.store.writer.connect() as connection:
            connection.execute(select(ablations.c.id).where(ablations.c.id == made[0]).with_for_update())
            for _ in range(3):
                assert beat(api, blocks[made[0]]) == 503
                assert beat(api, blocks[made[1]]) == 200
        assert beat(api, blocks[made[0]]) == 200


def beat(api: Api, block: dict[str, object]) -> int:
    """Send a heartbeat with progress, which writes an event of the ablation; return the status."""
    trials: list[dict[str, str]] = block["trials"]  # type: ignore[assignment]
    beat.step = getattr(beat, "step", 0) + 1  # type: ignore[attr-defined]
    progress = [{"trial_id": trials[0]["trial_id"], "steps_done": beat.step, "steps_total": 99}]  # type: ignore[attr-defined]
    return api.attempt(block, "heartbeat", progress=progress).status_code
