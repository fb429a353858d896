"""What both databases must do alike: migrations, rollback, concurrency, control characters, large ablations."""

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import IntegrityError

from ablate.service.store.migrate import upgrade
from ablate.service.store.session import Store
from ablate.service.store.tables import ablations, db_now, trials
from tests.api_stack import SIGNER, Api, api_fixture, database_url
from tests.factories import spec_values
from tests.waiting import at_once

KINDS = ["sqlite", "postgresql"]
OPENERS = 8


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    opened = Store(database_url(request.param, tmp_path))
    yield opened
    opened.close()


api = api_fixture(scope="module")


def test_a_connection_that_comes_back_after_closing_is_closed(store: Store) -> None:
    """A thread may wait for a database that hangs while the process that began it ends."""
    with store.read() as held, ExitStack() as late:
        drivers = [held.connection.driver_connection]
        store.close()
        drivers.append(late.enter_context(store.write()).connection.driver_connection)
        assert [is_open(driver) for driver in drivers] == [True, True]
    assert [is_open(driver) for driver in drivers] == [False, False]


def is_open(driver: Any) -> bool:
    try:
        driver.execute("SELECT 1")
    except (sqlite3.ProgrammingError, psycopg.OperationalError):
        return False
    return True


def test_failed_transaction_leaves_nothing(store: Store) -> None:
    upgrade(store)
    with pytest.raises(IntegrityError), store.write() as connection:
        connection.execute(text("INSERT INTO leaders VALUES ('x', 'y', 0), ('x', 'z', 0)"))
    with store.read() as connection:
        assert connection.execute(text("SELECT count(*) FROM leaders")).scalar_one() == 0


def test_database_clock_is_epoch_seconds(store: Store) -> None:
    with store.read() as connection:
        before = time.time()
        now = connection.execute(select(db_now())).scalar_one()
        after = time.time()
    assert before - 0.01 <= now <= after + 0.01  # SQLite counts milliseconds


def test_same_key_at_the_same_time_stores_one_ablation(api: Api) -> None:
    values = spec_values(ablation="at-once")
    answers = at_once(lambda _: api.post_spec(values, key="at-once"), 6)
    assert {answer.status_code for answer in answers} <= {202, 409}
    assert len({answer.json()["id"] for answer in answers if answer.status_code == 202}) == 1
    with api.store.read() as connection:
        query = select(func.count()).select_from(ablations).where(ablations.c.name == "at-once")
        assert connection.execute(query).scalar_one() == 1


def test_nul_and_other_control_characters_never_reach_the_database(api: Api) -> None:
    assert api.post_spec(spec_values(question="a\x00b")).status_code == 422
    assert api.get("/v1/ablations?label=a%00").status_code == 422
    assert api.get("/v1/ablations/abl_%00").status_code == 422
    answer = api.client.post("/v1/blocks:claim", headers=api.worker, json={"node_id": "nod_\x00"})
    assert answer.status_code == 404
    body = {
        "node_class": "cpu",
        "devices": [],
        "versions": {"a": "\x00"},
        "code_digest": "\x00",
        "public_key": SIGNER.key,
    }
    odd = api.worker_of("odd")
    assert api.client.put("/v1/nodes/odd", headers=odd, json=body).status_code == 200
    assert api.client.put("/v1/nodes/odd", headers=odd, json={**body, "node_class": "x" * 99}).status_code == 422
    surrogate = b'{"node_class": "cpu", "devices": [], "versions": {}, "code_digest": "\\ud800", "public_key": "%s"}'
    surrogate %= SIGNER.key.encode()
    headers = {**odd, "Content-Type": "application/json"}
    assert api.client.put("/v1/nodes/odd", headers=headers, content=surrogate).status_code == 422
    paired = surrogate.replace(b"\\ud800", b"\\ud83d\\ude00")
    assert api.client.put("/v1/nodes/odd", headers=headers, content=paired).status_code == 200


def test_ablation_of_many_trials_is_stored_listed_and_cancelled(api: Api) -> None:
    variants = {f"v{n}": {"gates": {"chunk_size": size, "loss": loss}} for n, (size, loss) in enumerate(_pairs())}
    made = api.submit(variants=variants, design={"seeds": [1], "blocks": {"count": 2000}})
    assert made["plan"]["trials"] == 2000 * (len(variants) + 1) > 20_000
    small = api.submit()
    for path in ("", "/blocks?limit=500", "/trials?limit=500"):
        assert api.get(made["links"]["self"] + path).status_code == 200
    assert api.cancel(small["id"]).status_code == 202
    node = api.register()
    block = api.claimed(node)
    api.attempt(block, "report", failure_class="preempted", message="x")
    assert api.cancel(made["id"]).json()["state"] == "cancelled"
    with api.store.read() as connection:
        query = select(trials.c.state).where(trials.c.ablation_id == made["id"]).distinct()
        assert connection.execute(query).scalars().all() == ["cancelled"]


def _pairs() -> list[tuple[int, str]]:
    return [(size, loss) for size in (8, 32, 64, 128, 256) for loss in ("dense", "chunked")]


def test_stores_that_open_a_new_sqlite_file_at_once_all_succeed(tmp_path: Path) -> None:
    for number in range(10):
        together = threading.Barrier(OPENERS)
        stores = [Store(f"sqlite:///{tmp_path / f'{number}.db'}") for _ in range(OPENERS)]

        def mode(place: int, stores: list[Store] = stores, together: threading.Barrier = together) -> str:
            together.wait()
            with stores[place].read() as connection:
                return str(connection.execute(text("PRAGMA journal_mode")).scalar())

        assert at_once(mode, OPENERS) == ["wal"] * OPENERS
        for store in stores:
            store.close()
