"""Several background processes: one leads, another takes over, and MLflow then equals the database."""

import os
import signal
import sqlite3
import subprocess
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url, select, update

from ablate.experiments.reporting.mlflow.sink import Projection
from ablate.experiments.reporting.view import AblationView
from ablate.service.background.leader import Leader, LeaderStore, duty
from ablate.service.background.projector import Projector
from ablate.service.errors import LeaseLost
from ablate.service.lifecycle import OutboxKind
from ablate.service.store import leaders, outbox
from ablate.service.store.tables import db_now
from ablate.service.store.tables import leaders as leaders_table
from ablate.service.store.tables import outbox as outbox_table
from tests import mlflow_server
from tests.api_stack import Api, api_fixture, database_url, running_api
from tests.chaos.books import read_runs
from tests.chaos.checker import mlflow_equals_the_database
from tests.chaos.ledger import Ledger, books_of
from tests.integration.test_outbox import RecordingSink
from tests.projectors import projector
from tests.service_process import BACKGROUND, service_process
from tests.waiting import LIMIT_S, until

LEASE_S = 2
ABLATIONS = 2


api = api_fixture()


def end_lease(api: Api) -> None:
    """Let the leader's lease run out, as if it had been frozen."""
    with api.store.write() as connection:
        connection.execute(update(leaders_table).values(until=db_now() - 1))


def test_one_process_leads_until_it_resigns_or_another_takes_over(api: Api) -> None:
    one, two, three = (Leader(api.store, lease_s=60) for _ in range(3))
    for leader in (one, two, one):
        leader.renew()
    assert (one.leads, two.leads) == (True, False)
    one.resign()
    two.renew()
    assert two.leads
    end_lease(api)
    two.renew()
    three.renew()
    assert (two.leads, two.is_lost, three.leads) == (True, False, False), "nobody took over"
    end_lease(api)
    three.renew()
    with pytest.raises(LeaseLost), closing(LeaderStore(api.store.url, two)) as store, store.write() as connection:
        outbox.add(connection, OutboxKind.HOOK, "of a deposed leader")
    two.renew()
    assert (two.leads, two.is_lost, three.leads) == (False, True, True)
    with api.store.read() as connection:
        assert connection.execute(select(outbox_table)).all() == []


def test_a_duty_that_hangs_ends_the_lead(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ablate.service.background.leader.ROUND_S", 0.5)
    leader, stop, over = Leader(api.store, lease_s=LEASE_S), threading.Event(), threading.Event()
    works = {"quick": lambda: False, "stuck": lambda: over.wait(LIMIT_S)}
    threads = [duty(leader, name, work, stop=stop) for name, work in works.items()]
    for thread in (leader.thread, *threads):
        thread.start()
    until(lambda: leader.hung)
    successor = Leader(api.store, lease_s=LEASE_S)
    until(lambda: successor.renew() or successor.leads)
    assert (leader.hung, leader.leads) == ("stuck", False)
    stop.set()
    over.set()


class Meanwhile(RecordingSink):
    """Notes which ablations it writes and whether they were tried before; something happens meanwhile."""

    def __init__(self, happens: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.happens = happens
        self.tried: list[tuple[str, bool]] = []

    def project(self, view: AblationView, report_html: str | None, *, was_tried: bool, **options: Any) -> Projection:
        self.tried.append((view.ablation_id, was_tried))
        self.happens()
        return super().project(view, report_html, was_tried=was_tried, **options)


@pytest.mark.parametrize("notices", ["before a call to MLflow", "at the end"])
def test_a_projection_of_a_deposed_leader_is_repaired_after_its_last_call(api: Api, notices: str) -> None:
    leader, successor, sink = Leader(api.store, lease_s=60), Leader(api.store, lease_s=60), Meanwhile()
    other = projector(api.store, sink)
    leader.renew()

    def take_over() -> None:
        end_lease(api)
        successor.renew()
        with api.store.write() as connection:
            connection.execute(update(outbox_table).values(due_at=db_now()))
        assert other.run_due()
        if notices == "before a call to MLflow":
            leader.renew()

    name = api.submit()["id"]
    with closing(LeaderStore(api.store.url, leader)) as led, pytest.raises(LeaseLost):
        Projector(led, Meanwhile(take_over), check=leader.check, anyone=api.store).run_due()
    assert sink.tried == [(name, True)], "the successor wrote it meanwhile"
    assert other.run_due()
    assert sink.tried == [(name, True)] * 2
    assert not other.run_due()


def background(home: Path, url: str, mlflow: str) -> AbstractContextManager["subprocess.Popen[bytes]"]:
    home.mkdir()
    settings = {"home": home, "projector_lease_s": LEASE_S, "broker_url": "memory://"}
    return service_process(BACKGROUND, home / "log", database_url=url, mlflow_url=mlflow, **settings)


def is_done(api: Api) -> bool:
    with api.store.read() as connection:
        kinds = connection.execute(select(outbox_table.c.kind).where(outbox_table.c.kind != OutboxKind.WAKE)).all()
    return not kinds


def freeze_between_writes(process: "subprocess.Popen[bytes]", url: str) -> None:
    """Stop `process` while it does not hold SQLite's write lock, which it would keep as long as it is stopped."""

    def is_frozen() -> bool:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)  # until the last of its threads has stopped
        with closing(sqlite3.connect(str(make_url(url).database), timeout=1, isolation_level=None)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:  # locked
                process.send_signal(signal.SIGCONT)
                return False
            connection.execute("ROLLBACK")
            return True

    until(is_frozen, what="a moment without SQLite's lock", pause_s=0.1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "fault"), [("sqlite", signal.SIGSTOP), ("postgresql", signal.SIGKILL)])
def test_another_process_takes_over_and_mlflow_equals_the_database(
    kind: str, tmp_path: Path, fault: signal.Signals
) -> None:
    url = database_url(kind, tmp_path)
    (tmp_path / "mlflow").mkdir()
    with (
        mlflow_server.running(tmp_path / "mlflow") as mlflow,
        running_api(kind, tmp_path, database_url=url) as api,
        background(tmp_path / "one", url, mlflow) as one,
        background(tmp_path / "two", url, mlflow) as two,
    ):
        logs = {one: tmp_path / "one" / "log", two: tmp_path / "two" / "log"}
        first = until(lambda: next((process for process, log in logs.items() if "leads as" in log.read_text()), None))
        second = two if first is one else one
        made = [api.submit()["id"] for _ in range(ABLATIONS)]
        api.finish(api.register())
        until(lambda: any("project of" in line for line in logs[first].read_text().splitlines()))
        if fault == signal.SIGSTOP:
            freeze_between_writes(first, url)
        else:
            first.send_signal(fault)
        until(lambda: "leads as" in logs[second].read_text())
        if fault == signal.SIGSTOP:
            until(lambda: "project of" in logs[second].read_text())
            first.send_signal(signal.SIGCONT)
            assert first.wait(LIMIT_S) == 1, "a deposed leader ends"
        until(lambda: is_done(api), what="the outbox")
        books = books_of(api.store, Ledger())
        books.runs = read_runs(tmp_path / "mlflow")
        with api.store.read() as connection:
            assert leaders.has_leader(connection, lease_s=LEASE_S)
    assert sorted(row["id"] for row in books.tables["ablations"] if row["mlflow_run_id"]) == sorted(made)
    assert list(mlflow_equals_the_database(books)) == []
