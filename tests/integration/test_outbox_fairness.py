"""Who waits for whom in the outbox: masses of cancelled ablations, projections that take long, takers that die."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, select, update

from experiments.errors import ProjectionUnfinished
from experiments.reporting.mlflow.sink import Check, Projection
from experiments.reporting.view import AblationView
from service.background import leadership
from service.background.leadership import Duty, Keeper
from service.background.outbox_handlers import LAST_FIRST_EVERY, OutboxHandlers
from service.lifecycle import OutboxKind
from service.store import leaders, outbox, projections
from service.store.columns import db_now
from service.store.outbox import Rank
from service.store.tables import leaders as leaders_table
from service.store.tables import outbox as outbox_table
from tests.api_stack import Api, running_api
from tests.projectors import projector

QUERY = """ SELECT * FROM outbox WHERE kind = 'project' AND due_at <= 1e12
AND 'p:' || key NOT IN (SELECT duty FROM leaders WHERE duty LIKE 'p:%%' AND holder != 'me' AND until > 1)
ORDER BY rank, due_at, id LIMIT 1"""
PROJECTED = Projection(parent_run_id="run1", experiment_id="7")


class Sink:
    """Stands where MLflow's sink stands, and notes who came when."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.unfinished = 0

    def project(
        self, view: AblationView, report_html: str | None, *, slice_s: float, check: Check, was_tried: bool
    ) -> Projection:
        check()
        if self.unfinished:
            self.unfinished -= 1
            raise ProjectionUnfinished("3 runs were written in this round")
        self.order.append(view.ablation_id)
        return PROJECTED


class SlowReceiver:
    """Stands where a webhook stands, and takes its time."""

    def __init__(self) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()

    def send(self, _message: str, _content: object) -> None:
        self.entered.set()
        assert self.leave.wait(60)


@pytest.fixture(params=["sqlite", "postgresql"])
def api(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Api]:
    with running_api(request.param, tmp_path) as running:
        yield running


def rows(api: Api) -> list[Any]:
    with api.store.read() as connection:
        return list(connection.execute(select(outbox_table).order_by(outbox_table.c.id)))


def cancelled(api: Api) -> str:
    made = api.submit()
    assert api.cancel(made["id"]).status_code == 202
    return str(made["id"])


def finished(api: Api) -> str:
    made = api.submit()
    api.finish(api.register())
    return str(made["id"])


def run_all(handlers: OutboxHandlers, *kinds: OutboxKind) -> None:
    while any([handlers.run_due(kind) for kind in kinds]):  # noqa: C419 - each kind has its turn
        pass


def test_new_verdict_passes_a_mass_of_cancelled_ablations_and_they_are_not_put_off_for_ever(api: Api) -> None:
    sink = Sink()
    handlers, mlflow = OutboxHandlers(api.store), projector(api.store, sink)
    mass = [cancelled(api) for _ in range(12)]
    wanted = finished(api)
    run_all(handlers, OutboxKind.REPORT, OutboxKind.JUDGE)
    assert {row.rank for row in rows(api) if row.kind == "project" and row.key in mass} == {Rank.LATER}
    for _ in range(LAST_FIRST_EVERY):
        mlflow.run_due()
    assert wanted in sink.order[:2], "it waits for one of the mass at most"
    while mlflow.run_due():
        pass
    assert sorted(sink.order) == sorted([*mass, wanted])


def test_a_mass_is_worked_on_while_new_rows_keep_coming(api: Api) -> None:
    with api.store.write() as connection:
        outbox.add(connection, OutboxKind.HOOK, "later", rank=Rank.LATER)
    handlers = OutboxHandlers(api.store)
    for number in range(LAST_FIRST_EVERY):
        with api.store.write() as connection:
            outbox.add(connection, OutboxKind.HOOK, f"first{number}")
        handlers.run_due(OutboxKind.HOOK)
    assert [row.key for row in rows(api) if row.kind == "hook"] == [f"first{LAST_FIRST_EVERY - 1}"]


def test_five_thousand_rows_that_may_wait_cost_a_take_next_to_nothing(api: Api) -> None:
    now = {"created_at": db_now(), "due_at": db_now(), "tries": 0, "kind": "project", "rank": int(Rank.LATER)}
    with api.store.write() as connection:
        connection.execute(insert(outbox_table).values([{**now, "key": f"abl_{n}"} for n in range(5000)]))
        outbox.add(connection, OutboxKind.PROJECT, "abl_new")
        lease = {"holder": "another", "until": db_now() + 60}
        connection.execute(insert(leaders_table).values(duty=projections.lease_of("abl_1"), **lease))
    with api.store.read() as connection:
        assert projections.next_due(connection, "me") == "abl_new"
    told = "EXPLAIN QUERY PLAN" if api.store.writer.dialect.name == "sqlite" else "EXPLAIN"
    with api.store.read() as connection:
        if told == "EXPLAIN":
            connection.exec_driver_sql("ANALYZE outbox")
        plan = connection.exec_driver_sql(told + QUERY)
        said = "\n".join(str(tuple(row)) for row in plan)
    assert "ix_outbox_kind_rank_due_at" in said


def test_a_projection_that_takes_long_lets_others_go_first_and_goes_on(api: Api) -> None:
    sink = Sink()
    sink.unfinished = 1
    handlers, mlflow = OutboxHandlers(api.store), projector(api.store, sink)
    first, second = finished(api), finished(api)
    run_all(handlers, OutboxKind.JUDGE)
    for _ in range(2):
        handlers.run_due(OutboxKind.REPORT)
    mlflow.run_due()
    (unfinished,) = [row for row in rows(api) if row.key == first and row.kind == "project"]
    assert (unfinished.tries, unfinished.last_error) == (0, None), "it is no failure"
    while mlflow.run_due():
        pass
    assert sink.order == [second, first]


def test_a_row_in_hand_stays_hidden_for_as_long_as_its_taker_works(api: Api) -> None:
    receiver = SlowReceiver()
    handlers = OutboxHandlers(api.store, receiver)  # type: ignore[arg-type]  # it takes what a webhook takes
    cancelled(api)
    handlers.run_due(OutboxKind.REPORT)
    thread = threading.Thread(target=handlers.run_due, args=[OutboxKind.HOOK])
    thread.start()
    assert receiver.entered.wait(60)
    with api.store.write() as connection:
        connection.execute(update(outbox_table).values(due_at=db_now() - 1))  # as if its hold had run out
    handlers.renew_holds()
    with api.store.write() as connection:
        assert outbox.take(connection, OutboxKind.HOOK, hold_s=60) == []
    receiver.leave.set()
    thread.join()
    assert not [row for row in rows(api) if row.kind == "hook"]
    handlers.renew_holds()


def test_a_duty_whose_round_takes_long_is_not_taken_over(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leadership, "DUTY_LEASE_S", 3.0)
    monkeypatch.setattr(leadership, "RENEW_EVERY_S", 0.2)
    monkeypatch.setattr(leadership, "TRY_EVERY_S", 0.1)
    stop, busy, leave = threading.Event(), threading.Event(), threading.Event()

    def work() -> bool:
        busy.set()
        return not leave.wait(60)

    duty = Duty(api.store, "projector", work, stop=stop)
    keeper = Keeper([duty.renew], stop=stop)
    keeper.thread.start()
    duty.thread.start()
    try:
        assert busy.wait(60)
        until = time.monotonic() + 5
        while time.monotonic() < until:
            assert not leaders.hold_duty(api.store, "projector", "another", lease_s=3)
            time.sleep(0.05)
    finally:
        stop.set()
        leave.set()
        duty.thread.join()
        keeper.thread.join()
    assert leaders.hold_duty(api.store, "projector", "another", lease_s=1), "it was handed over"


def test_a_lease_that_cannot_be_renewed_ends_the_duty(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leadership, "DUTY_LEASE_S", 1.0)
    rounds: list[float] = []
    stop = threading.Event()
    duty = Duty(api.store, "judge", lambda: bool(rounds.append(time.monotonic())), stop=stop)
    duty.renew()
    began = time.monotonic()
    duty.thread.start()
    time.sleep(1.8)
    stop.set()
    duty.thread.join()
    assert rounds
    assert max(rounds) <= began + 1.0
