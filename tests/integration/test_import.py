"""Importing bundles over REST on both databases: whole or not at all, once, refused when anything was altered."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select

from experiments.outcomes import FailureClass
from experiments.records.bundle_files import PLAN, RECEIPT
from experiments.records.plan_file import PlanFile, plan_file_text
from service.http.patient_json import AT_ONCE_BYTES, parse
from service.lifecycle import OutboxKind
from service.store.session import Store
from service.store.tables import ablations, attempts, receipts
from service.store.tables import outbox as outbox_table
from tests.api_stack import Api, running_api
from tests.bundles import broken_attempt, make_bundle, make_file, resealed, sealed


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with running_api(request.param, tmp_path_factory.mktemp("import")) as running:
        yield running


def send(
    api: Api, *bundles: dict[str, bytes], headers: dict[str, str] | None = None, unsigned: bool = True, **wanted: Any
) -> httpx.Response:
    sent = [{"files": {path: data.decode() for path, data in files.items()}} for files in bundles]
    body = {"bundles": sent, "unsigned": unsigned, **wanted}
    return api.client.post("/v1/ablations:import", headers=headers or api.admin, json=body)


def rows(store: Store, table: Any) -> int:
    with store.read() as connection:
        return int(connection.execute(select(func.count()).select_from(table)).scalar_one())


def pending(store: Store, file: PlanFile) -> list[str]:
    with store.read() as connection:
        query = select(outbox_table.c.kind).where(outbox_table.c.key == file.ablation_id)
        return list(connection.execute(query).scalars())


def problems(answer: httpx.Response) -> dict[str, str]:
    assert answer.status_code == 422, answer.text
    return {entry["pointer"]: entry["detail"] for entry in answer.json()["errors"]}


def test_import_lands_a_whole_ablation(api: Api) -> None:
    file = make_file(labels={"team": "far"})
    answer = send(api, make_bundle(file))
    assert answer.status_code == 200, answer.text
    made = answer.json()
    assert (made["id"], made["changed"], made["blocks_imported"]) == (file.ablation_id, True, 6)
    shown = api.get(f"/v1/ablations/{file.ablation_id}").json()
    assert (shown["state"], shown["blocks"]["done"], shown["trials"]["done"]) == ("completed", 6, 18)
    assert len(shown["bundles"]) == 1
    assert shown["labels"] == {"team": "far"}
    assert pending(api.store, file) == [OutboxKind.JUDGE]
    block = api.get(f"/v1/ablations/{file.ablation_id}/blocks").json()["items"][0]
    assert (block["started_at"], block["finished_at"]) == ("2026-11-20T12:00:00.000Z", "2026-11-20T12:00:50.000Z")
    trial = api.get(f"/v1/ablations/{file.ablation_id}/trials").json()["items"][0]
    assert api.get(f"/v1/trials/{trial['id']}/log").text == f"trial {trial['arm']}: step 0 é\n"
    assert api.get(f"/v1/trials/{trial['id']}/receipt").json()["ids"]["trial"] == trial["id"]
    node = next(n for n in api.get("/v1/nodes").json()["items"] if n["id"] == block["node_id"])
    assert (node["health"], node["name"]) == ("silent", f"far-node ({node['id']})")


def test_import_of_the_same_bundle_changes_nothing_and_says_so(api: Api) -> None:
    file = make_file()
    files = make_bundle(file, [0, 1])
    assert send(api, files).json()["changed"] is True
    before = [rows(api.store, table) for table in (ablations, attempts, receipts, outbox_table)]
    again = send(api, files)
    assert (again.status_code, again.json()["changed"]) == (200, False)
    assert [rows(api.store, table) for table in (ablations, attempts, receipts, outbox_table)] == before


def test_partial_bundle_leaves_missing_data(api: Api) -> None:
    file = make_file()
    made = send(api, make_bundle(file, [1, 3])).json()
    assert (made["state"], made["block_indices_missing"]) == ("completed", [0, 2, 4, 5])
    states = {b["index"]: b for b in api.get(f"/v1/ablations/{file.ablation_id}/blocks").json()["items"]}
    assert [states[index]["state"] for index in range(6)] == [
        "cancelled",
        "done",
        "cancelled",
        "done",
        "cancelled",
        "cancelled",
    ]
    assert states[0]["message"] == "the imported bundles do not hold every block"
    assert api.claim(api.register()) is None


def test_several_bundles_of_one_plan_are_imported_together(api: Api) -> None:
    file = make_file()
    one, two = make_bundle(file, [0, 1, 2]), make_bundle(file, [3, 4, 5])
    made = send(api, one, two).json()
    assert (made["blocks_imported"], made["block_indices_missing"]) == (6, [])
    assert send(api, two, one).json()["changed"] is False
    late = send(api, one)
    assert late.status_code == 409
    assert "import them together" in late.json()["detail"]
    assert "block 1 is in an earlier bundle" in problems(send(api, one, one))["bundle 2"]


def test_broken_attempts_and_failed_blocks_are_kept(api: Api) -> None:
    file = make_file()
    broken = [broken_attempt(1, number, FailureClass.TIMEOUT) for number in (1, 2)]
    retried = broken_attempt(2, 1, FailureClass.INFRA_NODE)
    assert send(api, make_bundle(file, [0], broken=[*broken, retried])).status_code == 200
    states = [b["state"] for b in api.get(f"/v1/ablations/{file.ablation_id}/blocks").json()["items"]]
    assert states == ["done", "failed", "cancelled", "cancelled", "cancelled", "cancelled"]
    with api.store.read() as connection:
        query = select(attempts.c.state, attempts.c.failure_class).where(attempts.c.id == retried.attempt_id)
        assert tuple(connection.execute(query).one()) == ("broken", "infra_node")


def test_bundle_without_a_block_that_counts_fails(api: Api) -> None:
    made = send(api, make_bundle(make_file(), [])).json()
    assert (made["state"], made["blocks_imported"]) == ("failed", 0)


def test_altered_receipt_is_refused_by_name_and_nothing_is_stored(api: Api) -> None:
    file = make_file()
    files = make_bundle(file)
    path = next(name for name in files if name.endswith(RECEIPT))
    before = rows(api.store, ablations)
    found = problems(send(api, {**files, path: files[path].replace(b'"arm":"', b'"arm":"x')}))
    pointer = "#/bundles/0/files/" + path.replace("/", "~1")
    assert "was altered" in found[pointer]
    values = json.loads(files[path])
    values["memory"]["peak_reserved_bytes"] -= 1
    assert "digest" in problems(send(api, sealed(file, {**files, path: json.dumps(values).encode()})))[pointer]
    assert rows(api.store, ablations) == before


def test_altered_plan_is_refused(api: Api) -> None:
    file = make_file()
    other = file.model_copy(update={"ablation_id": make_file().ablation_id})
    files = {**make_bundle(file), PLAN: plan_file_text(other).encode()}
    assert "was altered" in problems(send(api, sealed(file, files)))["#/bundles/0/files/plan.json"]


def test_ablation_that_was_submitted_here_is_not_overwritten(api: Api) -> None:
    submitted = api.submit()
    answer = send(api, make_bundle(resealed(make_file(), ablation_id=submitted["id"])))
    api.cancel(submitted["id"])  # its blocks would wait for whoever claims one in this module
    assert answer.status_code == 409
    assert "was submitted here" in answer.json()["detail"]


def test_ids_that_belong_to_something_else_are_refused(api: Api) -> None:
    file = make_file()
    assert send(api, make_bundle(file, [0])).status_code == 200
    twin = resealed(file, ablation_id=make_file().ablation_id)
    answer = send(api, make_bundle(twin, [0]))
    assert answer.status_code == 409
    assert "belongs to something else" in answer.json()["detail"]
    assert api.get(f"/v1/ablations/{twin.ablation_id}").status_code == 404


def test_import_needs_an_operator(api: Api) -> None:
    headers = api.token("submitter", "submit")
    assert send(api, make_bundle(make_file(), [0]), headers=headers).status_code == 403
    assert send(api, make_bundle(make_file(), [0]), headers=api.worker).status_code == 403


def test_remarks_name_the_code_that_really_ran(api: Api) -> None:
    (remark,) = send(api, make_bundle(make_file(), [0])).json()["remarks"]
    assert remark.startswith("the trials ran code sha256:code; the plan was made beside sha256:")


LARGE = "y" * (AT_ONCE_BYTES + 1)


def test_a_large_body_is_parsed_in_another_thread_than_requests_are_answered_from(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bool] = []

    def note(body: bytes) -> Any:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        parsed.append(len(body) > AT_ONCE_BYTES)
        return parse(body)

    monkeypatch.setattr("service.http.patient_json.parse", note)
    for text in ("small", LARGE):
        found = problems(send(api, {"x": text.encode()}))
        assert list(found) == ["#/bundles/0/files/manifest.json"]
    assert parsed == [True]


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ('"trust": [NaN]', "NaN is no JSON"),
        ('"trust": ["\\ud800"]', "a lone surrogate is no character"),
        ('"trust": [1', "Expecting ',' delimiter"),
        ('"trust": ' + "[" * 100_000, "the body cannot be read"),
    ],
)
def test_a_large_body_that_is_not_json_is_refused(api: Api, end: str, said: str) -> None:
    body = f'{{"bundles": [{{"files": {{"x": "{LARGE}"}}}}], {end}}}'
    headers = {**api.admin, "Content-Type": "application/json"}
    answer = api.client.post("/v1/ablations:import", content=body, headers=headers)
    assert answer.status_code == 422
    assert said in answer.json()["errors"][0]["detail"]
