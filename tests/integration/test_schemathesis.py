"""Property tests of the whole interface, generated from its own OpenAPI document."""

import re
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from schemathesis.core.parameters import ParameterLocation

from tests.api_stack import SIGNER, Api, api_fixture, bearer, served_api
from tests.factories import spec_values

schemathesis.serializer.alias("application/x-tar", "application/octet-stream")
schemathesis.serializer.alias("application/gzip", "application/octet-stream")
SPARE = "spare"
"""A node with a key, a session, and a token, that are changed and revoked like everything else."""
CASES = {"sqlite": 7, "postgresql": 5}
"""Of each operation and generation mode: the surface is the same on both, the answers come from the database."""
EVERY_CHECK = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)
REFUSED_BY_MEANING = frozenset(
    {
        "POST /v1/ablations",
        "POST /v1/ablations:plan",
        "POST /v1/ablations:import",
        "POST /v1/code:upload",
        "POST /v1/plans:register",
        "POST /v1/sessions/{name}:open",
        "POST /v1/sessions/{name}:try",
        "POST /v1/sessions/{name}:close",
        "GET /v1/sessions/{name}",
        "POST /v1/attempts/{attempt_id}:heartbeat",
        "POST /v1/attempts/{attempt_id}:report",
        "POST /v1/nodes",
        "POST /v1/enrolments",
        "POST /v1/notifications",
        "PUT /v1/nodes/{name}",
        "GET /v1/history/{recipe}",
    }
)
"""What is asked of these is more than a schema can say: gates, digests, signatures, hosts, names that exist."""


api = api_fixture(served_api, scope="module", rate_limit_per_s=1e6, rate_limit_burst=10**6)


def _real_ids(api: Api) -> dict[str, list[str]]:
    """Ids of an ablation that is over, one that waits, their trials and an attempt: unknown ids alone test little."""
    node = api.register()
    api.client.post("/v1/tokens", headers=api.admin, json={"name": SPARE, "scope": "read"})
    assert api.client.post(f"/v1/sessions/{SPARE}:open", headers=api.admin, json=spec_values()).status_code == 201
    over, waiting = api.submit(ablation="over"), api.submit(ablation="waiting")
    block = api.claimed(node)
    api.cancel(over["id"])
    api.attempt(block, "report", failure_class="cancelled", message="over")
    link = api.client.post(f"/v1/ablations/{over['id']}:share", headers=api.admin, json={})
    running_block = api.claimed(node)
    return {
        "ablation_id": [over["id"], waiting["id"]],
        "trial_id": [block["trials"][0]["trial_id"], running_block["trials"][0]["trial_id"]],
        "attempt_id": [block["attempt_id"], running_block["attempt_id"]],
        "share_id": [link.json()["link"]["id"]],
        "notification_id": [f"ntf_{'0' * 26}"],
        "name": [SPARE],
        "key": [SIGNER.key],
        "digest": [f"sha256:{'0' * 64}"],
        "recipe": ["hybrid-tiny"],
    }


def _never_ends(case: Any, ids: dict[str, list[str]]) -> bool:
    """Streams of things that are not over stay open, as they should."""
    return case.operation.label.endswith(("/events", "/log")) and any(
        value in (ids["ablation_id"][1], ids["trial_id"][1]) for value in case.path_parameters.values()
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_operation_answers_as_its_document_says(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")  # the library's own client obeys the dead proxy of the tests
    schema = schemathesis.openapi.from_dict(api.client.get("/openapi.json").json())
    ids = _real_ids(api)
    seen: dict[str, set[int]] = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        modes = [GenerationMode.POSITIVE]
        if operation.body or any(True for _ in operation.iter_parameters()):
            modes.append(GenerationMode.NEGATIVE)
        for mode in modes:
            statuses = _run(api, operation, mode, ids=ids)
            seen.setdefault(operation.label, set()).update(statuses)
    assert 202 in seen["POST /v1/ablations"] | seen["POST /v1/ablations/{ablation_id}:cancel"]
    assert {200, 422} <= seen["GET /v1/ablations"]
    assert all(status < 500 or label == "GET /readyz" for label, codes in seen.items() for status in codes)


def _run(api: Api, operation: Any, mode: GenerationMode, *, ids: dict[str, list[str]]) -> set[int]:
    may_be_unready = operation.label == "GET /readyz"  # nothing but the database is there
    names = EVERY_CHECK[may_be_unready:]
    if operation.label not in REFUSED_BY_MEANING:
        names = (*names, "positive_data_acceptance")
    checks = [CHECKS.get_one(name) for name in names]
    checks_of_answers = [CHECKS.get_one(name) for name in names if name != "negative_data_rejection"]
    statuses: set[int] = set()
    token = _token(api, operation)

    @seed(1)
    @settings(
        max_examples=CASES[api.store.writer.dialect.name],
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(mode), real=st.booleans(), which=st.integers(0, 1))
    def send(case: Any, real: bool, which: int) -> None:
        for name in (case.path_parameters or {}) if real else ():
            case.path_parameters[name] = ids[name][which % len(ids[name])]
        if _never_ends(case, ids):
            return
        case.headers = {**(case.headers or {}), **token}
        answer = case.call(base_url=str(api.client.base_url))
        statuses.add(answer.status_code)
        wrong_body = case.meta.is_negative_at(ParameterLocation.BODY)  # the test itself mends path and token
        case.validate_response(answer, checks=checks if wrong_body or mode.is_positive else checks_of_answers)

    send()
    return statuses


def _token(api: Api, operation: Any) -> dict[str, str]:
    """Return the headers of somebody who may do this to the real ids."""
    if "workers" not in operation.tags:
        return api.admin
    if operation.label.endswith(":enrol"):
        made = api.client.post("/v1/enrolments", headers=api.admin, json={"node_class": "cpu", "uses": 1000})
        return bearer(made.json()["secret"])
    return api.worker_of(SPARE if operation.label.startswith("PUT /v1/nodes/") else "node-a")


def test_a_wrong_method_is_told_every_right_one(api: Api) -> None:
    """Routes that share a path are listed together, whichever of them the framework finds first."""
    document, wrong = api.client.get("/openapi.json").json(), []
    for path, item in document["paths"].items():
        url = re.sub(r"\{\w+\}", "x", path)  # which methods there are is known before the names are looked at
        for method in {"delete", "get", "patch", "post", "put"} - set(item):
            answer = api.client.request(method, url, headers=api.admin)
            right = (405, ", ".join(sorted(name.upper() for name in item)))
            if (answer.status_code, answer.headers.get("allow")) != right:
                wrong.append((method, path, answer.status_code, answer.headers.get("allow")))
    assert wrong == []
