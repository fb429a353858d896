"""A list costs the same number of questions however many ablations it shows and however many wait."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from sqlalchemy import event

from tests.api_stack import Api, running_api


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with running_api(request.param, tmp_path_factory.mktemp("lists")) as running:
        running.register()
        for number in range(120):
            running.submit(ablation=f"waiting-{number}")
        yield running


def _statements(api: Api, path: str) -> int:
    statements: list[str] = []

    def note(*args: object) -> None:
        statements.append(str(args[2]))

    event.listen(api.store.reader, "before_cursor_execute", note)
    answer = api.get(path)
    event.remove(api.store.reader, "before_cursor_execute", note)
    assert answer.status_code == 200
    return len(statements)


def test_a_list_asks_no_question_for_each_row(api: Api) -> None:
    # the least of three: what is kept for a while, tokens and looks, may have to be asked for again on a busy machine
    few, many = (
        min(_statements(api, f"/v1/ablations?limit={limit}&state=queued") for _ in range(3)) for limit in (2, 100)
    )
    assert few == many <= 8


def test_what_each_waits_for_is_still_said(api: Api) -> None:
    api.register()  # again: on a busy machine the submissions take longer than a node may be silent
    rows = api.get("/v1/ablations?limit=100&state=queued").json()["items"]
    assert len(rows) == 100
    assert all(row["waiting_for"] for row in rows)
    assert len({row["waiting_for"] for row in rows}) > 50  # each has its own place in the queue


@pytest.mark.parametrize("called", ["waiting-7", "waiting-11", "waiting", "waiting_1", "WAITING-7", "abl_0", "nobody"])
def test_what_people_call_an_ablation_is_found_by_an_index(api: Api, called: str) -> None:
    asked: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, values: Any, *_: Any) -> None:
        asked.append((statement, values))

    event.listen(api.store.reader, "before_cursor_execute", note)
    answer = api.get(f"/v1/ablations:find?name={quote(called)}")
    event.remove(api.store.reader, "before_cursor_execute", note)
    known = [f"waiting-{number}" for number in range(120)]
    alike = [name for name in known if name.startswith(called)]
    expected = 200 if called in known else 409 if alike or called == "abl_0" else 404
    assert answer.status_code == expected, answer.text
    by_name = [one for one in asked if "ablations.name" in one[0] or "ablations.id LIKE" in one[0]]
    hints = [one for one in by_name if "WHERE" not in one[0]]  # names that are alike, of the newest
    assert all("LIMIT" in statement for statement, _ in hints)
    by_name = [one for one in by_name if one not in hints]
    assert by_name
    for statement, values in by_name:
        plan = plan_of(api, statement, values)
        assert "ix_ablations_name_id" in plan or "pk_ablations" in plan or "autoindex_ablations" in plan, plan
        assert "SCAN ablations" not in plan


def plan_of(api: Api, statement: str, values: Any) -> str:
    """Return how the database finds it; PostgreSQL is told that the table is large."""
    with api.store.read() as connection:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
            return str(connection.exec_driver_sql(f"EXPLAIN {statement}", values).all())
        return str(connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values).all())
