"""Importing bundles over REST on both databases: whole or not at all, once, refused when anything was altered."""

import gzip
import json
import tarfile
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select

from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.bundle_files import MAX_BUNDLE_BYTES, PLAN, RECEIPT
from ablate.experiments.records.plan_file import PlanFile, plan_file_text
from ablate.service.lifecycle import OutboxKind
from ablate.service.store.session import Store
from ablate.service.store.tables import ablations, attempts, receipts
from ablate.service.store.tables import outbox as outbox_table
from tests.api_stack import Api, api_fixture
from tests.bundles import archive_of, broken_attempt, make_bundle, make_file, resealed, sealed

api = api_fixture(scope="module")


def send(
    api: Api, *bundles: dict[str, bytes], headers: dict[str, str] | None = None, unsigned: bool = True, **options: Any
) -> httpx.Response:
    return post(api, archive_of(*bundles), headers=headers, unsigned=unsigned, **options)


def post(
    api: Api,
    body: bytes,
    *,
    headers: dict[str, str] | None = None,
    kind: str = "application/x-tar",
    **options: Any,
) -> httpx.Response:
    headers = {**(headers or api.admin), "Content-Type": kind}
    return api.client.post("/v1/ablations:import", headers=headers, params=options, content=body)


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
    messages = problems(send(api, {**files, path: files[path].replace(b'"arm":"', b'"arm":"x')}))
    pointer = f"archive:bundle-1/{path}"
    assert "was altered" in messages[pointer]
    values = json.loads(files[path])
    values["memory"]["peak_reserved_bytes"] -= 1
    assert "digest" in problems(send(api, sealed(file, {**files, path: json.dumps(values).encode()})))[pointer]
    assert rows(api.store, ablations) == before


def test_altered_plan_is_refused(api: Api) -> None:
    file = make_file()
    other = file.model_copy(update={"ablation_id": make_file().ablation_id})
    files = {**make_bundle(file), PLAN: plan_file_text(other).encode()}
    assert "was altered" in problems(send(api, sealed(file, files)))["archive:bundle-1/plan.json"]


def test_a_proposal_with_a_level_of_its_own_is_refused(api: Api) -> None:
    session = {"name": "mine", "proposal": 1, "kept": [], "level": 0.1}
    file, before = make_file(verdict__session=session), rows(api.store, ablations)
    messages = problems(send(api, make_bundle(file)))
    assert "the service sets 'session'" in messages["archive:plan.json#/verdict/session"]
    assert rows(api.store, ablations) == before


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
    assert remark.startswith("the trials ran code sha256:code; the plan was made with sha256:")


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_an_archive_may_be_compressed_and_have_its_files_anywhere(api: Api, mode: str) -> None:
    file = make_file()
    body = archive_of({f"deep/{path}": content for path, content in make_bundle(file).items()}, mode=mode)
    assert post(api, body, unsigned=True).json()["blocks_imported"] == 6


HUGE = tarfile.TarInfo("bundle-1/manifest.json")
HUGE.size = MAX_BUNDLE_BYTES + 1


@pytest.mark.parametrize(
    ("body", "pointer", "detail"),
    [
        (b"", "archive", "is not a tar file"),
        (b"no archive" * 1000, "archive", "is not a tar file"),
        (archive_of(make_bundle(make_file(), [0]))[:2000], "archive", "is not a tar file"),
        (gzip.compress(HUGE.tobuf()), "archive", "bytes allowed"),
        (archive_of({"plan.json": b"{}"}), "archive", "holds 0 files named manifest.json"),
        (archive_of(*[{"manifest.json": b"{}"}] * 101), "archive", "holds 101 files named manifest.json"),
        (archive_of({"a/manifest.json": b"{}", "b": b""}), "archive:bundle-1/b", "belongs to no bundle"),
        (archive_of({"manifest.json": b"{", "x": b"y"}), "archive:bundle-1/manifest.json", "manifest.json"),
    ],
    ids=["empty", "no-tar", "cut", "huge", "no-manifest", "many", "stray-file", "bad-manifest"],
)
def test_a_malformed_archive_is_rejected_with_the_place_of_the_problem(
    api: Api, body: bytes, pointer: str, detail: str
) -> None:
    before = rows(api.store, ablations)
    assert detail in problems(post(api, body))[pointer]
    assert rows(api.store, ablations) == before


def test_another_content_type_and_unknown_options_are_rejected(api: Api) -> None:
    body = archive_of(make_bundle(make_file(), [0]))
    wrong = post(api, body, kind="application/json")
    assert (wrong.status_code, "application/x-tar" in wrong.json()["detail"]) == (415, True)
    assert list(problems(post(api, body, unsinged=True))) == ["query:unsinged"]
    assert list(problems(post(api, body, trust="a key"))) == ["query:trust/0"]
