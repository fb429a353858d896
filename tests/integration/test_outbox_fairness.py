"""The order of outbox rows: masses of cancelled ablations, and projections that take long."""

from typing import Any

from sqlalchemy import insert, select

from ablate.experiments.errors import ProjectionUnfinished
from ablate.experiments.reporting.mlflow.sink import Check, Projection
from ablate.experiments.reporting.view import AblationView
from ablate.service.background.outbox_handlers import LAST_FIRST_EVERY, OutboxHandlers
from ablate.service.lifecycle import OutboxKind
from ablate.service.store import outbox
from ablate.service.store.outbox import Rank
from ablate.service.store.tables import db_now
from ablate.service.store.tables import outbox as outbox_table
from tests.api_stack import Api, api_fixture
from tests.projectors import projector

QUERY = " SELECT * FROM outbox WHERE kind = 'project' AND due_at <= 1e12 ORDER BY rank, due_at, id LIMIT 1"
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


api = api_fixture()


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
    ablation = finished(api)
    run_all(handlers, OutboxKind.REPORT, OutboxKind.JUDGE)
    assert {row.rank for row in rows(api) if row.kind == "project" and row.key in mass} == {Rank.LATER}
    for _ in range(LAST_FIRST_EVERY):
        mlflow.run_due()
    assert ablation in sink.order[:2], "it waits for one of the mass at most"
    while mlflow.run_due():
        pass
    assert sorted(sink.order) == sorted([*mass, ablation])


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
    with api.store.read() as connection:
        assert outbox.first_due(connection, [OutboxKind.PROJECT]) == "abl_new"
    explain = "EXPLAIN QUERY PLAN" if api.store.writer.dialect.name == "sqlite" else "EXPLAIN"
    with api.store.read() as connection:
        if explain == "EXPLAIN":
            connection.exec_driver_sql("ANALYZE outbox")
        plan = connection.exec_driver_sql(explain + QUERY)
        text = "\n".join(str(tuple(row)) for row in plan)
    assert "ix_outbox_kind_rank_due_at" in text


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
