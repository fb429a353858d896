"""Bad specs through the real submission path, on both stores: a problem with its pointer, and nothing stored.

Which problem each of them has is tested without a service (tests/unit/experiments/design/test_load.py).
"""

import json
import uuid
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select

from ablate.service.store.tables import metadata
from tests.api_stack import Api, api_fixture
from tests.bad_specs import BAD, BAD_TEXTS, JSON, bad_values
from tests.factories import spec_values

api = api_fixture(scope="module", max_body_bytes=1 << 20, max_report_bytes=8 << 20)


def post(api: Api, body: bytes, kind: str) -> httpx.Response:
    headers = {**api.admin, "Idempotency-Key": uuid.uuid4().hex, "Content-Type": kind}
    return api.client.post("/v1/ablations", content=body, headers=headers)


def stored(api: Api) -> dict[str, int]:
    names = ("ablations", "blocks", "trials", "events", "outbox", "idempotency", "labels")
    with api.store.read() as connection:
        return {n: connection.execute(select(func.count()).select_from(metadata.tables[n])).scalar_one() for n in names}


def pointers(answer: httpx.Response, status: int) -> list[str]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert document["status"] == status
    assert document["request_id"] == answer.headers["x-request-id"]
    return [error["pointer"] for error in document["errors"]]


@pytest.mark.parametrize("verb", [":plan", ""])
def test_a_design_whose_reports_the_service_would_reject_is_refused(api: Api, verb: str) -> None:
    changes = {"variants": {"chunk-32": {"gates": {"chunk_size": 32}}}}

    def ask(verb: str, timed: int, warmup: int) -> httpx.Response:
        steps = {"workload__steps": {"timed": timed, "warmup": warmup, "warmup_s": 0.0, "val_rows": 2}}
        headers = {**api.admin, "Idempotency-Key": uuid.uuid4().hex}
        return api.client.post(f"/v1/ablations{verb}", json=spec_values(**changes, **steps), headers=headers)

    refused = ask(verb, 10_000, 10_000)
    assert pointers(refused, 422) == ["#/workload/steps"]
    assert "15,360,768 bytes; allowed: 8,388,608" in refused.json()["errors"][0]["detail"]
    assert not any(stored(api).values())
    assert ask(":plan", 10_000, 500).is_success


@pytest.mark.parametrize("verb", [":plan", ""])
def test_a_spec_cannot_choose_the_level_of_its_tests(api: Api, verb: str) -> None:
    values = spec_values(verdict__session={"name": "mine", "proposal": 1, "kept": [], "level": 0.1})
    headers = {**api.admin, "Idempotency-Key": uuid.uuid4().hex}
    answer = api.client.post(f"/v1/ablations{verb}", json=values, headers=headers)
    assert pointers(answer, 422) == ["#/verdict/session"]
    assert not any(stored(api).values())


@pytest.mark.parametrize(("changes", "where"), [row[1:3] for row in BAD[::40]], ids=[row[0] for row in BAD[::40]])
def test_bad_spec_gets_a_problem_and_leaves_nothing(api: Api, changes: dict[str, Any], where: str) -> None:
    answer = post(api, json.dumps(bad_values(changes)).encode(), JSON)
    assert where in pointers(answer, 422)
    assert not any(stored(api).values())


@pytest.mark.parametrize(
    ("body", "kind", "where"), [row[1:4] for row in BAD_TEXTS[::20]], ids=[row[0] for row in BAD_TEXTS[::20]]
)
def test_bad_text_gets_a_problem_and_leaves_nothing(api: Api, body: bytes, kind: str, where: str) -> None:
    assert where in pointers(post(api, body, kind), 422)
    assert not any(stored(api).values())
