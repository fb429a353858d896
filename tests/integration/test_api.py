"""The REST surface, on SQLite: one test per verb and outcome."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from sqlalchemy import func, select

from ablate.service.store.migrate import newest_revision
from ablate.service.store.tables import metadata
from tests.api_stack import Api, api_fixture, running_api
from tests.factories import make_spec, spec_values

api = api_fixture(kinds=["sqlite"], scope="module")


def rows(api: Api) -> dict[str, int]:
    with api.store.read() as connection:
        return {
            name: connection.execute(select(func.count()).select_from(table)).scalar_one()
            for name, table in metadata.tables.items()
        }


def problem(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert set(document) == {"type", "title", "status", "detail", "instance", "errors", "request_id"}
    assert document["status"] == status
    assert document["request_id"] == answer.headers["x-request-id"]
    return dict(document)


def test_submit_answers_202_with_plan_and_links(api: Api) -> None:
    answer = api.post_spec(spec_values())
    body = answer.json()
    assert answer.status_code == 202
    assert answer.headers["location"] == f"/v1/ablations/{body['id']}" == body["links"]["self"]
    assert answer.headers["retry-after"].isdigit()
    assert answer.headers["etag"]
    assert body["plan"]["arms"] == ["baseline", "psiv-on", "chunk-32"]
    assert (body["plan"]["blocks"], body["plan"]["trials"]) == (6, 18)
    shown = api.get(body["links"]["self"]).json()
    assert shown["blocks"] == {"planned": 6, "done": 0, "failed": 0}
    assert shown["spec_digest"] == body["spec_digest"] == make_spec().digest


def test_submit_same_key_and_body_gives_same_answer_and_stores_once(api: Api) -> None:
    first = api.post_spec(spec_values(), key="same-key")
    before = rows(api)
    second = api.post_spec(spec_values(), key="same-key")
    assert first.content == second.content
    assert first.headers["etag"] == second.headers["etag"]
    assert {**before, "outbox": 0} == {**rows(api), "outbox": 0}


def test_submit_same_key_with_another_body_is_422(api: Api) -> None:
    api.post_spec(spec_values(), key="other-body")
    answer = api.post_spec(spec_values(ablation="another"), key="other-body")
    assert problem(answer, 422)["type"].endswith("idempotency-mismatch")


def test_submit_key_in_flight_is_409(api: Api) -> None:
    services = api.client.app.state.services  # type: ignore[attr-defined]
    with api.store.read() as connection:
        token_id = connection.execute(select(metadata.tables["tokens"].c.id).filter_by(name="admin")).scalar_one()
    services.in_flight.add((token_id, "in-flight"))
    answer = api.post_spec(spec_values(), key="in-flight")
    services.in_flight.clear()
    assert problem(answer, 409)["type"].endswith("idempotency-in-flight")
    assert answer.headers["retry-after"] == "1"


def test_submit_without_key_is_400(api: Api) -> None:
    answer = api.client.post("/v1/ablations", json=spec_values(), headers=api.admin)
    assert "Idempotency-Key" in problem(answer, 400)["detail"]


def test_submit_wrong_spec_names_pointer_and_hint_and_stores_nothing(api: Api) -> None:
    before = rows(api)
    answer = api.post_spec(spec_values(variants={"a": {"gates": {"psiv_cach": True}}}), key="wrong")
    (error,) = problem(answer, 422)["errors"]
    assert error["pointer"] == "#/variants/a/gates/psiv_cach"
    assert error["hint"] == "did you mean 'psiv_cache'?"
    assert rows(api) == before


def test_submit_yaml_and_json_give_the_same_digest(api: Api) -> None:
    text = yaml.safe_dump(spec_values())
    headers = {**api.admin, "Content-Type": "application/yaml; charset=utf-8", "Idempotency-Key": "yaml"}
    answer = api.client.post("/v1/ablations", content=text, headers=headers)
    assert answer.json()["spec_digest"] == api.submit()["spec_digest"]


def test_plan_has_no_side_effect_and_tells_eligibility(api: Api) -> None:
    api.register("plan-node")
    before = rows(api)
    answer = api.client.post("/v1/ablations:plan", json=spec_values(), headers=api.admin)
    body = answer.json()
    assert answer.status_code == 200
    assert [arm["name"] for arm in body["arms"]] == ["baseline", "psiv-on", "chunk-32"]
    assert len(body["blocks"]) == 6
    by_class = {item["node_class"]: item for item in body["node_classes"]}
    assert by_class["cpu"]["eligible"]
    assert not by_class["h200"]["eligible"]
    assert "cpu" in by_class["h200"]["reason"]
    assert rows(api) == before


def test_get_with_etag_is_304_until_something_changes(api: Api) -> None:
    path = api.submit()["links"]["self"]
    tag = api.get(path).headers["etag"]
    assert api.get(path, headers={"If-None-Match": tag}).status_code == 304
    api.cancel(path.rpartition("/")[2])
    assert api.get(path, headers={"If-None-Match": tag}).status_code == 200


def test_list_pages_newest_first_without_repeating(api: Api) -> None:
    ids = [api.submit(ablation="paged", labels={"set": "paged"})["id"] for _ in range(5)]
    seen, path = [], "/v1/ablations?limit=2&label=set%3Dpaged"
    for _ in range(3):
        answer = api.get(path)
        seen += [item["id"] for item in answer.json()["items"]]
        if "link" in answer.headers:
            path = answer.headers["link"].partition("<")[2].partition(">")[0]
            assert answer.headers["link"].endswith('rel="next"')
    assert seen == ids[::-1]
    assert answer.json()["next_cursor"] is None
    assert "link" not in answer.headers


def test_list_filters_by_state_label_digest_name_and_owner(api: Api) -> None:
    made = api.submit(ablation="filtered", labels={"team": "filter"})
    api.cancel(made["id"])

    def listed(query: str) -> list[str]:
        return [item["id"] for item in api.get(f"/v1/ablations?limit=500&{query}").json()["items"]]

    assert listed("label=team") == listed("label=team%3Dfilter") == [made["id"]]
    assert listed("label=team%3Dother") == []
    assert made["id"] in listed("state=cancelled&state=failed")
    assert made["id"] not in listed("state=queued")
    assert listed(f"digest={made['spec_digest']}") == [made["id"]]
    assert listed("name=filtered") == [made["id"]]
    assert listed("name=filter") == []
    assert made["id"] in listed("owner=admin")
    assert listed("owner=nobody") == listed("name=filtered&owner=nobody") == []
    assert api.get(f"/v1/ablations/{made['id']}").json()["submitted_by"] == "admin"


@pytest.mark.parametrize("kind", ["ablations", "blocks", "trials"])
def test_list_refuses_unknown_parameters_and_bad_cursors(api: Api, kind: str) -> None:
    path = "/v1/ablations" if kind == "ablations" else f"{api.submit()['links']['self']}/{kind}"
    for query in ("stat=queued", "cursor=AAAA_", "limit=0", "limit=501", "name=a b", "owner=a/b"):
        answer = problem(api.get(f"{path}?{query}"), 422)
        assert answer["errors"][0]["pointer"] == f"query:{query.partition('=')[0]}"


@pytest.mark.parametrize("limit", [1, 4, 5, 6, 7, 18, 500])
def test_blocks_and_trials_page_in_running_order(api: Api, limit: int) -> None:
    ablation = api.submit()["links"]["self"]
    assert [block["index"] for block in _walk(api, f"{ablation}/blocks", limit)] == list(range(6))
    places = [(trial["block_index"], trial["position"]) for trial in _walk(api, f"{ablation}/trials", limit)]
    assert places == [(block, place) for block in range(6) for place in range(3)]


def _walk(api: Api, path: str, limit: int) -> Iterator[dict[str, Any]]:
    """The items of all pages, by the links; every page but the last is full."""
    following: str | None = f"{path}?limit={limit}"
    while following:
        answer = api.get(following)
        page, link = answer.json(), answer.headers.get("link")
        assert (link is None) == (page["next_cursor"] is None)
        assert 0 < len(page["items"]) <= limit
        assert link is None or len(page["items"]) == limit
        yield from page["items"]
        following = link and link.partition("<")[2].partition(">")[0]


def test_unknown_things_are_404(api: Api) -> None:
    nothing = "01KAHZ3V5T8QW2R4Y6M9N0P1S3"
    for path in (f"ablations/abl_{nothing}", f"ablations/abl_{nothing}/events", f"trials/trl_{nothing}/receipt"):
        problem(api.get(f"/v1/{path}"), 404)
    problem(api.get(f"/v1/trials/trl_{nothing}/log"), 404)
    problem(api.cancel(f"abl_{nothing}"), 404)
    problem(api.get("/nowhere"), 404)
    assert problem(api.get("/v1/ablations/abl_1"), 422)["errors"][0]["pointer"] == "path:ablation_id"


def test_wrong_method_and_media_type_are_problems(api: Api) -> None:
    problem(api.client.delete("/v1/ablations", headers=api.admin), 405)
    headers = {**api.admin, "Content-Type": "text/plain", "Idempotency-Key": "k"}
    problem(api.client.post("/v1/ablations", content="x", headers=headers), 415)
    claim = {**api.worker, "Content-Type": "text/plain"}
    problem(api.client.post("/v1/blocks:claim", content="{}", headers=claim), 415)


def test_body_over_the_limit_is_413_with_and_without_a_declared_length(api: Api) -> None:
    headers = {**api.admin, "Content-Type": "application/json", "Idempotency-Key": "big"}
    big = b'"' + b"x" * 1_100_000 + b'"'
    problem(api.client.post("/v1/ablations", content=big, headers=headers), 413)
    chunked = (big[start : start + 65536] for start in range(0, len(big), 65536))
    problem(api.client.post("/v1/ablations", content=chunked, headers=headers), 413)


def test_request_without_a_token_is_told_the_scheme(api: Api) -> None:
    path = api.submit()["links"]["self"]
    anonymous = api.client.get(path)
    problem(anonymous, 401)
    assert anonymous.headers["www-authenticate"] == "Bearer"


def test_secrets_are_stored_hashed(api: Api) -> None:
    with api.store.read() as connection:
        digests = list(connection.execute(select(metadata.tables["token_secrets"].c.digest)).scalars())
    assert digests
    assert all(digest.startswith("sha256:") for digest in digests)


def test_rate_limit_is_429_with_retry_after(tmp_path: Path) -> None:
    with running_api("sqlite", tmp_path, rate_limit_per_s=0.01, rate_limit_burst=3) as api:
        answers = [api.get("/v1/identity") for _ in range(4)]
    assert [a.status_code for a in answers] == [200, 200, 200, 429]
    problem(answers[3], 429)
    assert 0 < int(answers[3].headers["retry-after"]) <= 100


def test_cancel_queued_ends_at_once_and_repeats_as_409(api: Api) -> None:
    made = api.submit()
    answer = api.cancel(made["id"])
    assert answer.status_code == 202
    assert answer.json()["state"] == "cancelled"
    assert "is cancelled" in problem(api.cancel(made["id"]), 409)["detail"]
    states = {block["state"] for block in api.get(f"{made['links']['self']}/blocks").json()["items"]}
    assert states == {"cancelled"}


def test_verdict_report_and_receipt_before_they_exist_are_409(api: Api) -> None:
    made = api.submit()
    assert "queued" in problem(api.get(made["links"]["verdict"]), 409)["detail"]
    problem(api.get(made["links"]["report"]), 409)
    trial = api.get(f"{made['links']['self']}/trials?limit=1").json()["items"][0]
    problem(api.get(f"/v1/trials/{trial['id']}/receipt"), 409)


def test_waiting_for_says_what_a_queued_ablation_waits_for(tmp_path: Path) -> None:
    with running_api("sqlite", tmp_path) as api:
        first, second = api.submit(), api.submit()
        assert "none has registered yet" in api.get(first["links"]["self"]).json()["waiting_for"]
        api.register()
        assert "1 live, 1 block ahead" in api.get(second["links"]["self"]).json()["waiting_for"]


def test_nodes_and_schema(api: Api) -> None:
    node_id = api.register("listed-node")
    assert api.register("listed-node") == node_id
    listed = {node["name"]: node for node in api.get("/v1/nodes").json()["items"]}["listed-node"]
    assert (listed["id"], listed["health"], listed["node_class"]) == (node_id, "live", "cpu")
    assert "variants" in api.client.get("/v1/schema/ablation.json").json()["properties"]


def test_operators_pages_need_no_token(api: Api) -> None:
    assert api.client.get("/healthz").text == "ok"
    assert api.client.get("/version").json()["schema_revision"] == newest_revision()
    metrics = api.client.get("/metrics").text
    assert 'ablate_blocks{state="queued"}' in metrics
    assert 'route="/v1/ablations/{ablation_id}"' in metrics
    assert api.client.get("/readyz").json()["degraded"] == ["background", "broker", "mlflow"]


def test_request_id_is_kept_when_it_is_sane(api: Api) -> None:
    assert api.get("/healthz", headers={"X-Request-Id": "abc-12345"}).headers["x-request-id"] == "abc-12345"
    assert api.get("/healthz", headers={"X-Request-Id": "a b"}).headers["x-request-id"].startswith("req_")


def test_unexpected_error_is_a_problem_that_tells_nothing(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: object, **_options: object) -> None:
        raise RuntimeError("a secret detail")

    monkeypatch.setattr("ablate.service.routes.nodes.nodes.list_nodes", broken)
    answer = api.get("/v1/nodes")
    problem(answer, 500)
    assert "secret" not in answer.text
