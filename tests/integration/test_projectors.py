"""Several projectors: drawn interleavings with crashes and freezes against one projector alone, and real freezes."""

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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import delete, select, update

from experiments.reporting import mlflow_runs, mlflow_sink
from experiments.reporting.mlflow_content import ID_TAG, RUN_TAG
from experiments.reporting.mlflow_runs import is_open
from experiments.reporting.mlflow_sink import Projection, Sink
from experiments.reporting.view import AblationView
from service import ablation_lease
from service import projector as projector_module
from service.lifecycle import OutboxKind
from service.store import leaders, outbox, results
from service.store.columns import db_now
from service.store.projections import PROJECTOR
from service.store.tables import ablations, trials
from service.store.tables import leaders as leaders_table
from service.store.tables import outbox as outbox_table
from tests import views
from tests.api_stack import Api, database_url, running_api
from tests.bench.costs import copies
from tests.integration.mlflow_in_memory import Server
from tests.integration.projector_world import HERE, LEASE_S, Steps, World
from tests.integration.test_outbox import RecordingSink, until
from tests.projectors import projector

SEQUENCES = 7
STEPS = 70


@pytest.fixture(params=["sqlite", "postgresql"])
def api(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Api]:
    with running_api(request.param, tmp_path) as running:
        yield running


class Draw:
    """One drawn sequence: what happens to ablations, and to the projectors that show them."""

    def __init__(self, world: World, server: Server, seed: int, template: str) -> None:
        self.chance = random.Random(seed)  # noqa: S311 - a drawn test
        self.world, self.server = world, server
        self.steps = [self._start() for _ in range(self.chance.randint(2, 4))]
        self.names = copies(world.store, template, self.chance.randint(1, 3))
        self.states = dict.fromkeys(self.names, "queued")

    def _start(self) -> Steps:
        holder: list[Steps] = []
        client = self.server.client(lambda: holder[0].before_call())
        holder.append(Steps(self.world, client))
        return holder[0]

    def one(self) -> None:
        """Do one drawn thing."""
        acts = {self._step: 80, self._ask: 3, self._move: 3, self._crash: 1.5, self._freeze: 1.5, self._steal: 1.5}
        acts |= {self._break: 1.5, self._due: 1}
        (act,) = self.chance.choices(list(acts), list(acts.values()))
        act()

    def _step(self) -> None:
        one = self.chance.choice(self.steps)
        for _ in range(self.chance.randint(1, 12)):
            one.step()

    def _somebody(self) -> Steps:
        """Return a projector, rather one that is writing."""
        writing = [one for one in self.steps if one.is_armed]
        return self.chance.choice(writing if writing and self.chance.random() < 0.8 else self.steps)

    def _meanwhile(self, still: Steps) -> None:
        """Let the others go on, some steps or so many that they are done."""
        others = [one for one in self.steps if one is not still]
        for _ in range(self.chance.choice([0, 20, 60, 200])):
            self.chance.choice(others).step()

    def _ask(self) -> None:
        """Ask again, as a rebuild does."""
        name = self.chance.choice(self.names)
        kind = OutboxKind.PROJECT if self.states[name] == "cancelled" else OutboxKind.ANNOUNCE
        with self.world.store.write() as connection:
            outbox.add(connection, kind, name, rank=self.chance.choice(list(outbox.Rank)))

    def _move(self) -> None:
        """Let an ablation go on."""
        self._go_on(self.chance.choice(self.names))

    def _go_on(self, name: str) -> None:
        if self.states[name] == "queued":
            self._set(name, "running", OutboxKind.ANNOUNCE)
        elif self.states[name] == "running":
            self._set(name, "cancelled", None)
            self._set(name, "cancelled", OutboxKind.PROJECT, report_html=f"<p>{name}</p>")

    def _set(self, name: str, state: str, kind: OutboxKind | None, **values: Any) -> None:
        with self.world.store.write() as connection:
            row = update(ablations).where(ablations.c.id == name)
            connection.execute(row.values(state=state, finished_at=db_now(), **values))
            if state == "cancelled":
                lost = update(trials).where(trials.c.ablation_id == name, trials.c.block_index == 0)
                connection.execute(lost.values(state="cancelled", attempt_id=f"att_{name[4:]}"))
            if kind is not None:
                outbox.add(connection, kind, name)
        self.states[name] = state

    def _crash(self) -> None:
        gone = self._somebody()
        self.steps[self.steps.index(gone)] = self._start()
        gone.kill()
        if self.chance.random() < 0.7:
            self.world.end_leases(gone.projector.holder)

    def _freeze(self) -> None:
        """Freeze one for longer than its lease, while the others renew theirs; its alarm ends it if it is writing."""
        frozen = self._somebody()
        for _ in range(3):
            self.world.now += LEASE_S / 2.5
            for other in self.steps:
                if other is not frozen:
                    _renew(other)
        self.world.end_leases(frozen.projector.holder)
        frozen.is_frozen = True
        self._meanwhile(frozen)
        frozen.is_frozen = False
        if frozen.is_armed:
            self.steps[self.steps.index(frozen)] = self._start()
            frozen.kill()

    def _steal(self) -> None:
        """Set the database's clock: a lease ends early, and its holder goes on writing, late."""
        one = self._somebody()
        stolen = set(self.world.leases(one.projector.holder))
        self.world.stolen |= stolen
        self.world.end_leases(one.projector.holder)
        for name in stolen:
            self._go_on(name)
            self._go_on(name)
        self._meanwhile(one)
        if self.chance.random() < 0.3:
            _renew(one)

    def _break(self) -> None:
        self.chance.choice(self.steps).fails_next = True

    def _due(self) -> None:
        with self.world.store.write() as connection:
            connection.execute(update(outbox_table).values(due_at=db_now()))

    def finish(self) -> None:
        """Let everything be answered, without further trouble."""
        for _ in range(400):
            self._due()
            with self.world.store.read() as connection:
                left = connection.execute(select(outbox_table)).all()
            if not left:
                break
            for one in self.steps:
                one.fails_next = False
                for _ in range(40):
                    one.step()
            living = [one.projector.holder for one in self.steps]
            with self.world.store.write() as connection:
                connection.execute(delete(leaders_table).where(leaders_table.c.holder.not_in(living)))
        else:
            raise AssertionError(f"not answered: {left}")

    def close(self) -> None:
        for one in self.steps:
            one.kill()


def _renew(one: Steps) -> None:
    """Do what the keeper of a living process does, in no step of its own."""
    whole, one.projector._lease._store = one.projector._lease._store, one.world.store
    one.projector.renew()
    one.projector._lease._store = whole


def alone(world: World, names: list[str], patch: pytest.MonkeyPatch) -> Server:
    """Return what one sink writes that was never disturbed."""
    server = Server()
    patch.setattr(mlflow_sink, "connect", lambda *_args, **_options: server.client(lambda: None))
    for name in names:
        with world.store.read() as connection:
            view = results.ablation_view(connection, name)
            html = None if is_open(view.state) else results.read_report(connection, name)
        Sink("memory").project(view, html)
    return server


def test_drawn_interleavings_end_as_one_projector_alone_would(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    template = api.submit(design__blocks={"count": 6})["id"]
    with api.store.write() as connection:
        connection.execute(delete(outbox_table))
    at_once = 0
    for seed in range(SEQUENCES):
        world, server = World(api.store), Server()
        with monkeypatch.context() as patch:
            patch.setattr(ablation_lease, "now_s", lambda world=world: world.now)
            patch.setattr(projector_module, "SLICE_S", random.Random(seed).choice([60.0, 0.0]))  # noqa: S311
            patch.setattr(mlflow_sink, "connect", lambda *_args, **_options: HERE.client)
            draw = Draw(world, server, seed, template)
            try:
                for name in draw.names:
                    with api.store.write() as connection:
                        outbox.add(connection, OutboxKind.ANNOUNCE, name)
                for _ in range(STEPS):
                    draw.one()
                draw.finish()
            finally:
                draw.close()
            expected = alone(world, draw.names, patch)
        assert world.problems == [], f"seed {seed}"
        for name in draw.names:
            assert server.shown(name) == expected.shown(name), f"seed {seed}: {name}"
            with api.store.read() as connection:
                told = connection.execute(select(ablations.c.mlflow_run_id).where(ablations.c.id == name)).scalar()
            assert server.runs[str(told)]["tags"]["ablation.run"] == "parent", f"seed {seed}"
        at_once = max(at_once, world.together)
    assert at_once > 1, "nothing ever ran in parallel"


WRITER = """
import sys, threading, time
from service.lease_alarm import LeaseAlarm, now_s
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
            [sys.executable, "-m", "service.background"], env={**os.environ, **settings}, stderr=log
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
    monkeypatch.setattr(mlflow_sink, "connect", lambda *_args, **_options: server.client(lambda: None))
    monkeypatch.setattr(mlflow_runs, "plots", lambda _view: {})
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

    monkeypatch.setattr(mlflow_sink, "connect", lambda *_args, **_options: server.client(late))
    monkeypatch.setattr(mlflow_runs, "plots", lambda _view: {})
    done = Sink("memory").project(view, "<p>")
    parents = [run for name, run in server.shown(view.ablation_id) if name == "parent"]
    assert next(calls) > 20
    assert parents == [server.runs[done.parent_run_id] | {"tags": parents[0]["tags"]}]
