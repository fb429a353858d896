"""Keys of nodes over REST, on both databases: who may register, report and import with which key."""

import json
from typing import Any

import httpx
import pytest

from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.bundle_reader import open_bundle
from ablate.experiments.records.circumstances import BlockSigner
from ablate.experiments.records.signing import Signer
from ablate.service.background.outbox_handlers import OutboxHandlers
from ablate.service.lifecycle import OutboxKind
from tests.api_stack import SIGNER, Api, api_fixture, receipts_of, signed
from tests.bundles import archive_of, broken_attempt, make_bundle, make_file, sealed

MINE, STRANGER = Signer(b"m" * 32), Signer(b"s" * 32)


api = api_fixture(scope="module")


def register(api: Api, name: str, key: str | None) -> httpx.Response:
    body = {"node_class": "cpu", "devices": [], "versions": {}, "code_digest": "sha256:c", "public_key": key}
    return api.put_node(name, body)


def operate(api: Api, key: str, verb: str, **body: Any) -> httpx.Response:
    return api.client.post(f"/v1/keys/{key}:{verb}", headers=api.admin, json=body)


def send(api: Api, *files: dict[str, bytes], **options: Any) -> httpx.Response:
    headers = {**api.admin, "Content-Type": "application/x-tar"}
    return api.client.post("/v1/ablations:import", headers=headers, params=options, content=archive_of(*files))


def problem(answer: httpx.Response) -> tuple[str, str]:
    assert answer.status_code == 422, answer.text
    (entry,) = answer.json()["errors"]
    return entry["pointer"], entry["detail"]


def judged(api: Api, ablation_id: str) -> Verdict:
    handlers = OutboxHandlers(api.store)
    while handlers.run_due(OutboxKind.JUDGE):
        pass
    return Verdict.model_validate(api.get(f"/v1/ablations/{ablation_id}/verdict").json())


def test_node_registers_with_one_key_until_an_operator_trusts_another(api: Api) -> None:
    assert problem(register(api, "first", None))[0] == "#/public_key"
    assert register(api, "first", MINE.key).status_code == 200
    assert register(api, "first", MINE.key).status_code == 200
    refused = register(api, "first", STRANGER.key)
    assert refused.status_code == 403
    assert f"ablate admin keys trust {STRANGER.key} --node first" in refused.json()["detail"]
    assert operate(api, STRANGER.key, "trust", node="first").status_code == 200
    assert register(api, "first", STRANGER.key).status_code == 200
    lost = register(api, "first", MINE.key)
    assert (lost.status_code, f"replaced by {STRANGER.key}" in lost.json()["detail"]) == (403, True)
    shown = next(row for row in api.get("/v1/nodes").json()["items"] if row["name"] == "first")
    assert shown["public_key"] == STRANGER.key


def test_keys_are_listed_and_only_operators_change_them(api: Api) -> None:
    key = Signer(b"l" * 32).key
    assert register(api, "listed", key).status_code == 200
    rows = [row for row in api.get("/v1/keys").json()["items"] if row["node"] == "listed"]
    assert [(row["key"], row["trusted_by"], row["revoked_at"]) for row in rows] == [(key, "first registration", None)]
    as_worker = api.client.post(f"/v1/keys/{key}:revoke", headers=api.worker, json={"reason": "x"})
    assert as_worker.status_code == 403
    unknown = Signer(b"u" * 32).key
    assert operate(api, unknown, "revoke", reason="x").status_code == 404
    assert operate(api, "ed25519:short", "trust", node="n").status_code == 422


@pytest.mark.parametrize("broke", [False, True])
def test_report_counts_only_with_the_signature_of_its_node(api: Api, broke: bool) -> None:
    made = api.submit()
    node_id = api.register("reporter")
    block = api.claimed(node_id)
    body: dict[str, Any] = {"receipts": receipts_of(block, node_id)}
    if broke:
        body = {"failure_class": FailureClass.NO_RECEIPT, "message": "it died"}
    good = signed(block, {"token": block["token"], **body})
    where, detail = problem(api.attempt(block, "report", **body, signature=None))
    assert (where, "is by nobody" in detail) == ("#/signature", True)
    by_stranger = {**good["signature"], "key": STRANGER.key}
    assert (
        "the node that holds this attempt registered"
        in problem(api.attempt(block, "report", **body, signature=by_stranger))[1]
    )
    changed = {**body, "message": "it was stopped"} if broke else {"receipts": body["receipts"][::-1]}
    assert "does not fit key" in problem(api.attempt(block, "report", **changed, signature=good["signature"]))[1]
    assert api.attempt(block, "report", **body).status_code == 200
    if not broke:
        digests = [receipt["digest"] for receipt in body["receipts"]]
        for trial in block["trials"]:
            shown = api.get(f"/v1/trials/{trial['trial_id']}/receipt").json()["signature"]
            assert (shown["receipts"], shown["by"]["key"]) == (digests, good["signature"]["key"])
    api.cancel(made["id"])


def test_revoked_key_reports_nothing_more(api: Api) -> None:
    own = Signer(b"r" * 32)
    made = api.submit()
    node_id = register(api, "revoked", own.key).json()["node_id"]
    block = api.claimed(node_id)
    operate(api, own.key, "revoke", reason="the disk was stolen")
    assert (
        "was revoked: the disk was stolen"
        in problem(api.attempt(block, "report", receipts=receipts_of(block, node_id)))[1]
    )
    assert "was revoked" in register(api, "revoked", own.key).json()["detail"]
    api.cancel(made["id"])


def test_verdict_of_a_service_names_who_signed(api: Api) -> None:
    made = api.submit()
    node_id = api.register("signing-node")
    assert api.finish(node_id) == 6
    (signer,) = judged(api, made["id"]).circumstances.signers
    assert signer == BlockSigner(node=node_id, name="signing-node", key=SIGNER.key, blocks=(0, 1, 2, 3, 4, 5))


def test_import_wants_every_key_trusted(api: Api) -> None:
    file = make_file()
    broken = [broken_attempt(1, 1, FailureClass.TIMEOUT)]
    own = Signer(b"i" * 32)
    files = make_bundle(file, broken=broken, signer=own)
    where, detail = problem(send(api, files))
    assert (where, own.key in detail, "is not known here" in detail) == ("query:trust", True, True)
    assert api.get(f"/v1/ablations/{file.ablation_id}").status_code == 404
    where, detail = problem(send(api, files, trust=[own.key, STRANGER.key]))
    assert (where, "signed nothing in these bundles" in detail) == ("query:trust", True)
    assert send(api, files, trust=[own.key]).json()["changed"] is True
    assert send(api, files).json()["changed"] is False
    assert send(api, make_bundle(make_file(), signer=own)).status_code == 200
    verdict = judged(api, file.ablation_id)
    assert verdict.circumstances.signers == open_bundle(files).signers
    assert [(one.name, one.key, one.blocks) for one in verdict.circumstances.signers] == [
        ("far-node", own.key, (0, 1, 2, 3, 4, 5))
    ]
    operate(api, own.key, "revoke", reason="sold")
    assert "was revoked: sold" in problem(send(api, make_bundle(make_file(), signer=own)))[1]


def test_a_key_speaks_only_for_the_nodes_that_it_is_trusted_for(api: Api) -> None:
    own = Signer(b"j" * 32)
    operate(api, own.key, "trust", node="laptop")
    file = make_file()
    files = make_bundle(file, signer=own)
    where, detail = problem(send(api, files))
    assert (where, f"{own.key} as node 'far-node'; this key is trusted for node 'laptop'" in detail) == (
        "query:trust",
        True,
    )
    path = next(name for name in files if name.startswith("nodes/"))
    files[path] = json.dumps({**json.loads(files[path]), "name": "laptop"}).encode()
    assert send(api, sealed(file, files, own)).status_code == 200
    assert send(api, make_bundle(make_file(), signer=own), trust=[own.key]).status_code == 200
    assert send(api, make_bundle(make_file(), signer=own)).status_code == 200


def test_import_of_what_nobody_signed_is_said_by_the_verdict(api: Api) -> None:
    file = make_file()
    files = make_bundle(file, [0, 1])
    where, detail = problem(send(api, files))
    assert (where, "a bundle is not signed by its node" in detail) == ("query:unsigned", True)
    assert send(api, files, unsigned=True).status_code == 200
    circumstances = judged(api, file.ablation_id).circumstances
    (signer,) = circumstances.signers
    assert (signer.name, signer.key, signer.blocks) == ("far-node", None, (0, 1))


def test_one_unsigned_bundle_among_signed_ones_is_not_enough(api: Api) -> None:
    file = make_file()
    bundles = make_bundle(file, [0, 1], signer=MINE), make_bundle(file, [2, 3])
    answer = send(api, *bundles, trust=[MINE.key])
    assert problem(answer) == ("query:unsigned", "a bundle is not signed by its node")
    assert send(api, *bundles, trust=[MINE.key], unsigned=True).status_code == 200
    assert {one.key for one in judged(api, file.ablation_id).circumstances.signers} == {MINE.key, None}
