"""A list costs the same number of questions however many ablations it shows and however many wait."""

from collections.abc import Iterator

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
    found: list[str] = []

    def note(*args: object) -> None:
        found.append(str(args[2]))

    event.listen(api.store.reader, "before_cursor_execute", note)
    answer = api.get(path)
    event.remove(api.store.reader, "before_cursor_execute", note)
    assert answer.status_code == 200
    return len(found)


def test_a_list_asks_no_question_for_each_row(api: Api) -> None:
    api.get("/v1/ablations?limit=1")  # the token is known from here on
    few, many = (_statements(api, f"/v1/ablations?limit={limit}&state=queued") for limit in (2, 100))
    assert few == many <= 8


def test_what_each_waits_for_is_still_said(api: Api) -> None:
    rows = api.get("/v1/ablations?limit=100&state=queued").json()["items"]
    assert len(rows) == 100
    assert all(row["waiting_for"] for row in rows)
    assert len({row["waiting_for"] for row in rows}) > 50  # each has its own place in the queue
