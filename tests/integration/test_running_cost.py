"""What runs is summed up once for a list, whatever the database knows of its tables."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from service.store.ablations import queue
from tests.api_stack import Api, running_api

RUNNING = 30


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with running_api("postgresql", tmp_path) as running:
        with running.store.write() as connection:  # nothing is known of a database that was filled a moment ago
            for table in ("blocks", "trials", "attempts", "ablations"):
                connection.exec_driver_sql(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
        running.submit(design={"seeds": [1], "blocks": {"count": 4 * RUNNING}})
        node = running.register()
        for _ in range(RUNNING):
            assert running.claim(node)
        yield running


def test_postgresql_sums_up_the_trials_of_what_runs_once(api: Api) -> None:
    asked: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, values: Any, *_: Any) -> None:
        asked.append((statement, values))

    event.listen(api.store.writer, "before_cursor_execute", note)
    with api.store.read() as connection:
        assert len(queue.running(connection, ["cpu"])) == RUNNING
    event.remove(api.store.writer, "before_cursor_execute", note)
    ((statement, values),) = asked
    with api.store.read() as connection:
        found = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", values).scalar_one()
    plan = found if isinstance(found, list) else json.loads(found)
    sums = [step for step in _steps(plan[0]["Plan"]) if step["Node Type"] == "Aggregate"]
    assert [step["Actual Loops"] for step in sums] == [1], "each running block sums up the trials of all of them"


def _steps(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield step
    for part in step.get("Plans", ()):
        yield from _steps(part)
