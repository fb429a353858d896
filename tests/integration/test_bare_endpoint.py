"""The yardstick of `make bench-api` stores what a submission stores, or its ratio says nothing."""

from pathlib import Path

from fastapi.testclient import TestClient
from sqlalchemy import func, select

from service.store.session import Store
from service.store.tables import metadata
from tests.api_stack import database_url, running_api
from tests.bench import bare
from tests.bench.api import BODY

IN_A_SUBMISSION = ("ablations", "blocks", "trials", "questions", "events", "outbox", "idempotency")


def counted(store: Store) -> dict[str, int]:
    with store.read() as connection:
        queries = {name: select(func.count()).select_from(metadata.tables[name]) for name in IN_A_SUBMISSION}
        return {name: connection.execute(query).scalar_one() for name, query in queries.items()}


def test_the_bare_endpoint_stores_the_rows_of_a_submission(tmp_path: Path) -> None:
    headers = {"Content-Type": "application/json", "Idempotency-Key": "once"}
    store = Store(database_url("sqlite", tmp_path / "bare"))
    with TestClient(bare.create_app(store, "{}")) as client:
        assert client.post("/v1/ablations", content=BODY, headers=headers).status_code == 202
    with running_api("sqlite", tmp_path / "whole") as api:
        assert api.client.post("/v1/ablations", content=BODY, headers=api.admin | headers).status_code == 202
        assert counted(store) == counted(api.store)
    store.close()
