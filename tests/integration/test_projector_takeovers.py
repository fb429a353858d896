"""Several projectors: freezes of real processes, takeovers, late calls, and how far each is behind."""

import copy
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Connection, update
from sqlalchemy.exc import OperationalError

from experiments.reporting.mlflow import runs, sink
from experiments.reporting.mlflow.content import ID_TAG, RUN_TAG
from experiments.reporting.mlflow.sink import Projection, Sink
from experiments.reporting.view import AblationView
from service.background import ablation_lease
from service.store import leaders
from service.store.columns import db_now
from service.store.projections import PROJECTOR
from service.store.session import Store
from service.store.tables import leaders as leaders_table
from service.store.tables import outbox as outbox_table
from tests import views
from tests.api_stack import Api, database_url, running_api
from tests.integration.mlflow_in_memory import Server
from tests.integration.projector_world import LEASE_S, World
from tests.integration.test_outbox import RecordingSink
from tests.integration.test_projectors import alone
from tests.projectors import projector
from tests.waiting import until


@pytest.fixture(params=["sqlite", "postgresql"])
def api(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Api]:
    with running_api(request.param, tmp_path) as running:
        yield running


WRITER = """
import sys, threading, time
from service.background.lease_alarm import LeaseAlarm, now_s
alarm, out = LeaseAlarm(), open(sys.argv[1], "a", buffering=1)
def write():
    while True:
        out.write(f"{now_s()}\\n")
threading.Thread(target=write, daemon=True).start()
alarm.set(now_s() + 60)
alarm.clear()
alarm.set(now_s() + 1.5)
print("running", flush=True)
time.sleep(60)
"""


def test_a_frozen_process_does_nothing_more_when_its_lease_ran_out_meanwhile(tmp_path: Path) -> None:
    told = tmp_path / "written"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(told)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"running\n"
        process.send_signal(signal.SIGSTOP)
        until(lambda: state_of(process.pid) == "T")
        before = told.read_bytes()
        time.sleep(2)  # the lease
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == -signal.SIGALRM
    assert told.read_bytes() == before


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_what_a_frozen_background_process_had_in_hand_is_taken_over_and_it_never_comes_back(tmp_path: Path) -> None:
    url, sink = database_url("sqlite", tmp_path), RecordingSink()
    with (
        running_api("sqlite", tmp_path, database_url=url) as api,
        socket.create_server(("127.0.0.1", 0)) as mute,
        background(tmp_path, url, mute.getsockname()[1]) as process,
    ):
        made = api.submit()
        mute.settimeout(120)
        with mute.accept()[0]:  # it is inside a call to MLflow now
            process.send_signal(signal.SIGSTOP)
            other = projector(api.store, sink)
            assert not other.run_due(), "it is in the hands of a projector whose lease counts"
            until(lambda: other.run_due())
            process.send_signal(signal.SIGCONT)
            assert process.wait(60) == -signal.SIGALRM
        assert [view.ablation_id for view in sink.views] == [made["id"]]
        assert api.get(made["links"]["self"]).json()["mlflow_url"] is not None
        assert not other.run_due()


@contextmanager
def background(home: Path, url: str, mlflow_port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a background process whose MLflow is at a port."""
    settings = {"ABLATE_HOME": str(home), "ABLATE_DATABASE_URL": url, "ABLATE_PROJECTOR_LEASE_S": "3"}
    settings["ABLATE_MLFLOW_URL"] = f"http://127.0.0.1:{mlflow_port}"
    with (home / "background.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "service.background.main"], env={**os.environ, **settings}, stderr=log
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_two_projectors_have_two_ablations_in_hand_and_each_tells_its_own_lag(api: Api) -> None:
    first, second = Waiting(), Waiting()
    one, two, three = (projector(api.store, sink) for sink in (first, second, RecordingSink()))
    made = [api.submit()["id"] for _ in range(2)]
    with api.store.write() as connection:
        connection.execute(update(outbox_table).values(created_at=db_now() - 60))
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(one.run_due)]
        assert first.entered.wait(60)
        done.append(pool.submit(two.run_due))
        assert second.entered.wait(60)
        assert not three.run_due(), "both are in hand"
        for holder in (one.holder, two.holder, three.holder):
            assert leaders.hold_duty(api.store, leaders.duty_of_its_own(PROJECTOR, holder), holder, lease_s=60)
        assert "projector" not in lapsed(api)
        lags = told_lags(api)
        first.leave.set()
        second.leave.set()
        assert [future.result(60) for future in done] == [True, True]
    assert {first.names[0], second.names[0]} == set(made)
    assert set(lags) == {one.holder, two.holder, three.holder}
    assert 60 <= lags[one.holder] < 180
    assert 60 <= lags[two.holder] < 180
    assert lags[three.holder] == 0
    until(lambda: set(told_lags(api).values()) == {0.0})  # metrics are shared for two seconds


class Waiting(RecordingSink):
    """Stands inside MLflow until it may leave."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.entered, self.leave = threading.Event(), threading.Event()

    def project(self, view: AblationView, report_html: str | None, **options: Any) -> Projection:
        self.names.append(view.ablation_id)
        self.entered.set()
        assert self.leave.wait(60)
        return super().project(view, report_html, **options)


def lapsed(api: Api) -> list[str]:
    with api.store.read() as connection:
        return leaders.lapsed_duties(connection)


def told_lags(api: Api) -> dict[str, float]:
    families = text_string_to_metric_families(api.client.get("/metrics").text)
    (gauge,) = [family for family in families if family.name == "ablate_projector_lag_seconds"]
    return {sample.labels["projector"]: sample.value for sample in gauge.samples}


def test_a_call_that_came_late_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    view, server = views.cpu_view(), Server()
    monkeypatch.setattr(sink, "connect", lambda *_args, **_options: server.client(lambda: None))
    monkeypatch.setattr(runs, "plots", lambda _view: {})
    done = Sink("memory").project(view, "<p>")
    clean = copy.deepcopy(server.shown(view.ablation_id))
    late = server.client(lambda: None)
    late.update_run(done.parent_run_id, status="RUNNING", name="it still runs")
    late.set_tag(done.parent_run_id, "ablation.state", "running")
    Sink("memory").project(view, "<p>", was_tried=True)
    assert server.shown(view.ablation_id) == clean


def test_a_run_that_somebody_else_creates_meanwhile_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    view, server, calls = views.cpu_view(), Server(), itertools.count()
    tags = {ID_TAG: view.ablation_id, RUN_TAG: "parent"}

    def late() -> None:
        if next(calls) == 20:
            server.create(tags, "of a projector that died", 0)

    monkeypatch.setattr(sink, "connect", lambda *_args, **_options: server.client(late))
    monkeypatch.setattr(runs, "plots", lambda _view: {})
    done = Sink("memory").project(view, "<p>")
    parents = [run for name, run in server.shown(view.ablation_id) if name == "parent"]
    assert next(calls) > 20
    assert parents == [server.runs[done.parent_run_id] | {"tags": parents[0]["tags"]}]


def test_a_projector_whose_lease_was_taken_asks_again_after_its_last_call(api: Api) -> None:
    sink, after = Robbed(), Tried()
    one, other = projector(api.store, sink), projector(api.store, after)
    sink.meanwhile = lambda: (rob(api, one.holder), other.run_due())
    name = api.submit()["id"]
    assert one.run_due()
    assert after.tried == [(name, True)], "the other projector wrote it while the first one did"
    assert len(sink.views) == 1
    assert other.run_due(), "what the loser wrote late is written over"
    assert after.tried == [(name, True)] * 2
    assert not one.run_due()


def rob(api: Api, holder: str) -> None:
    """End the leases of a projector, as a clock that is set does."""
    with api.store.write() as connection:
        connection.execute(update(leaders_table).where(leaders_table.c.holder == holder).values(until=db_now() - 1))


class Tried(RecordingSink):
    """Keeps whether it was told of a try before."""

    def __init__(self) -> None:
        super().__init__()
        self.tried: list[tuple[str, bool]] = []

    def project(self, view: AblationView, report_html: str | None, *, was_tried: bool, **options: Any) -> Projection:
        self.tried.append((view.ablation_id, was_tried))
        return super().project(view, report_html, was_tried=was_tried, **options)


class Robbed(RecordingSink):
    """Something happens in the middle of its call."""

    meanwhile: Callable[[], object]

    def project(self, view: AblationView, report_html: str | None, **options: Any) -> Projection:
        self.meanwhile()
        return super().project(view, report_html, **options)


class Away(Store):
    """A database that is away now and then, on a clock of the test's."""

    now = written_at = 0.0
    is_away = False

    @contextmanager
    def write(self) -> Iterator[Connection]:
        if self.is_away:
            raise OperationalError("", {}, OSError("the database is away"))
        with super().write() as connection:
            yield connection
        self.written_at = self.now


@pytest.fixture
def store(api: Api) -> Iterator[Away]:
    with closing(Away(api.store.url)) as opened:
        yield opened


def test_no_call_is_begun_when_the_database_could_not_be_reached_for_half_of_the_lease(
    api: Api, store: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, ends = random.Random(26), []  # noqa: S311 - a drawn test
    monkeypatch.setattr(ablation_lease, "now_s", lambda: store.now)
    for _ in range(12):
        server, name, silent_s = Server(), api.submit()["id"], [0.0]
        one = projector(store, Sink("memory"), lease_s=LEASE_S)

        def before(one: Any = one, silent_s: list[float] = silent_s) -> None:
            """Note for how long nothing was renewed; then time goes by, and the keeper does its work."""
            silent_s.append(store.now - store.written_at)
            store.now += chance.uniform(0, LEASE_S / 3)
            store.is_away = chance.random() < 0.6
            with suppress(OperationalError):
                one.renew()

        with monkeypatch.context() as patch:
            patch.setattr(sink, "connect", lambda *_args, **_options: server.client(before))  # noqa: B023
            with suppress(OperationalError):
                one.run_due()
            store.is_away = False
            ends.append(len(silent_s))
            assert max(silent_s) <= LEASE_S / 2
            rob(api, one.holder)
            patch.setattr(sink, "connect", lambda *_args, **_options: server.client(lambda: None))  # noqa: B023
            projector(api.store, Sink("memory"), lease_s=LEASE_S).run_due()
            shown = server.shown(name)
            assert shown == alone(World(api.store), [name], patch).shown(name)
    assert len(set(ends)) > 2, f"calls of each: {ends}"
