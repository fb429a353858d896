"""The commands around bundles as people type them, against a real API where one is needed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ablate.experiments.outcomes import SeedOrigin
from ablate.experiments.records.bundle_files import MANIFEST, RECEIPT, write_tar
from ablate.experiments.records.plan_file import read_plan_file
from ablate.experiments.records.signing import Signer
from ablate.service.client.settings import get_client_settings
from tests.api_stack import SIGNER, Api, receipts_of, served_api
from tests.bundles import make_bundle, make_file, write_folder
from tests.cli import ablate, speaking_to

FILE = make_file()


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    with served_api("sqlite", tmp_path / "api") as running, speaking_to(running, monkeypatch):
        yield running


def test_plan_out_writes_a_plan_file_without_a_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ABLATE_URL", raising=False)
    monkeypatch.setenv("ABLATE_HOME", str(tmp_path))
    get_client_settings.cache_clear()  # it may be of a test before
    path = tmp_path / "plan.json"
    code, out, err = ablate("plan", "demo", "--out", path)
    assert code == 0, err
    file = read_plan_file(path.read_bytes())
    assert file.spec_text.startswith("# Four arms on a CPU node")
    assert file.digest in out
    assert "ablate offline exec plan.json --out bundle/" in out
    code, out, _err = ablate("plan", "demo", "--out", path, "--json")
    assert json.loads(out)["ablation"] != file.ablation_id


def test_plan_out_refuses_what_no_node_can_run(tmp_path: Path) -> None:
    code, _out, err = ablate("plan", "demo-refused", "--out", tmp_path / "plan.json")
    assert code == 5
    assert "gate 'warp_specialize' needs lane cuda" in err
    assert not (tmp_path / "plan.json").exists()


def test_verdict_report_and_receipts_of_a_bundle_need_no_service(tmp_path: Path) -> None:
    folder = write_folder(make_bundle(FILE), tmp_path / "bundle")
    code, out, _err = ablate("verdict", folder, "--explain")
    assert (code, "6/6 blocks on cpu" in out) == (3, True)
    unsigned = "Nobody signed for far-node: anybody who had the files could have changed them"
    assert "blocks 1-6 of far-node: signed by nobody" in out
    assert unsigned in out
    page = tmp_path / "r.html"
    assert ablate("report", folder, "--out", page)[0] == 0
    assert FILE.ablation_id in page.read_text()
    assert unsigned in page.read_text()
    own = Signer(b"o" * 32)
    signed = write_folder(make_bundle(FILE, signer=own), tmp_path / "signed")
    code, out, _err = ablate("verdict", signed)
    assert (f"blocks 1-6 of far-node: signed by {own.key}" in out, "Nobody signed" in out) == (True, False)
    code, out, _err = ablate("offline", "verify", folder)
    assert (code, out.count("good")) == (0, 18)


def test_verify_says_who_signed_and_refuses_other_keys(tmp_path: Path) -> None:
    own, other = Signer(b"o" * 32), Signer(b"x" * 32)
    folder = write_folder(make_bundle(FILE, [0, 1], signer=own), tmp_path / "bundle")
    code, out, err = ablate("offline", "verify", folder, "--key", own.key)
    assert (code, out.count("good"), f"blocks 1-2 of far-node: signed by {own.key}" in err) == (0, 6, True)
    code, out, _err = ablate("offline", "verify", folder, "--key", other.key)
    assert (code, f"is signed by {own.key}, which is none of the given keys" in out) == (6, True)
    unsigned = write_folder(make_bundle(FILE, [0]), tmp_path / "unsigned")
    code, out, err = ablate("offline", "verify", unsigned, "--key", own.key)
    assert (code, "is not signed" in out, "signed by nobody" in err) == (6, True, True)


def test_a_stripped_signature_is_the_first_line_and_fails_where_signatures_are_required(tmp_path: Path) -> None:
    files = make_bundle(FILE, [0, 1], signer=Signer(b"o" * 32))
    signed, stripped = write_folder(files, tmp_path / "signed"), write_folder(files, tmp_path / "stripped")
    manifest = stripped / MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "signature": None}))
    assert ablate("offline", "verify", signed, "--signed")[0] == 0
    for option, expected in ((), 0), (("--signed",), 6):
        code, out, _err = ablate("offline", "verify", stripped, *option)
        assert (code, out.startswith(f"UNSIGNED  {manifest}: anybody who had these files")) == (expected, True)
    assert f"DAMAGED  {manifest}\n    is not signed" in out
    unsigned = write_folder(make_bundle(FILE, [0]), tmp_path / "no")
    code, out, _err = ablate("offline", "verify", unsigned, "--json")
    assert (code, json.loads(out)["unsigned"]) == (0, [f"{unsigned}/{MANIFEST}"])


def test_a_plan_is_counted_by_the_service_before_it_is_carried_away(tmp_path: Path, api: Api) -> None:
    path = tmp_path / "plan.json"
    for number in (1, 2):
        code, out, err = ablate("plan", "demo", "--out", path)
        assert (code, f"counted  as asking {number} of its question, with seeds drawn now" in out) == (0, True), err
    first = read_plan_file(path.read_bytes())
    assert (first.registered is None, first.plan.seeds) == (False, SeedOrigin.DRAWN)
    code, out, _err = ablate("plan", "demo", "--out", path, "--seeds", "7,8")
    assert (code, "asking 3 of its question, with seeds chosen in the spec" in out) == (0, True)
    assert [block.seed for block in read_plan_file(path.read_bytes()).plan.blocks] == [7, 8, 7, 8]
    code, _out, err = ablate("plan", "demo", "--seeds", "7;8")
    assert (code, "--seeds is '7;8'; allowed: whole numbers with commas between them" in err) == (5, True), err
    code, out, _err = ablate("plan", "demo", "--out", path, "--unregistered")
    assert (code, "counted  by nobody: no service registered this plan" in " ".join(out.split(" "))) == (0, True)
    alone = read_plan_file(path.read_bytes())
    assert (alone.registered, alone.plan.seeds) == (None, SeedOrigin.DRAWN)


def test_import_trusts_the_key_that_it_is_told(tmp_path: Path, api: Api) -> None:
    own = Signer(b"o" * 32)
    folder = write_folder(make_bundle(FILE, [0], signer=own), tmp_path / "bundle")
    code, _out, err = ablate("offline", "import", folder)
    assert (code, f"--trust {own.key}" in err) == (5, True)
    assert ablate("offline", "import", folder, "--trust", own.key)[0] == 0
    code, out, _err = ablate("admin", "keys", "list", "--json")
    assert [(row["key"], row["node"]) for row in json.loads(out)["items"]] == [(own.key, "far-node")]
    assert ablate("admin", "keys", "revoke", own.key, "--reason", "sold")[0] == 0
    assert ablate("admin", "keys", "trust", own.key, "--node", "far-node")[0] == 0


def test_altered_receipt_is_named_by_every_command(tmp_path: Path, api: Api) -> None:
    folder = write_folder(make_bundle(FILE), tmp_path / "bundle")
    path = sorted(folder.glob(f"blocks/*/*/{RECEIPT}"))[0]
    path.write_text(path.read_text().replace('"wall_s":3.0', '"wall_s":2.0'))
    name = path.relative_to(folder).as_posix()
    code, out, _err = ablate("offline", "verify", folder)
    assert (code, out.count("DAMAGED"), out.count("good")) == (6, 1, 17)
    for command in (("offline", "import"), ("verdict",), ("report",)):
        code, _out, err = ablate(*command, folder)
        assert code == 5
        assert name in err
        assert "was altered" in err
    assert api.get("/v1/ablations").json()["items"] == []


def test_import_of_folder_and_tar_is_the_same_import(tmp_path: Path, api: Api) -> None:
    files = make_bundle(FILE, [0, 1, 2])
    folder = write_folder(files, tmp_path / "bundle")
    write_tar(files, tmp_path / "bundle.tar")
    code, out, err = ablate("offline", "import", folder, "--unsigned")
    assert code == 0, err
    assert f"imported as {FILE.ablation_id}: completed" in out
    assert "3 imported; 3 are missing data" in out
    code, out, _err = ablate("offline", "import", tmp_path / "bundle.tar", "--unsigned")
    assert (code, "nothing was changed" in out) == (0, True)
    code, out, _err = ablate("offline", "import", folder, "--unsigned", "--json")
    assert json.loads(out)["changed"] is False


def test_import_refuses_what_is_no_bundle_and_parts_that_do_not_belong_together(tmp_path: Path, api: Api) -> None:
    code, _out, err = ablate("offline", "import", tmp_path / "nothing")
    assert (code, "no such folder" in err) == (5, True)
    one = write_folder(make_bundle(FILE, [0]), tmp_path / "one")
    code, _out, err = ablate("offline", "import", one, one)
    assert (code, "block 1 is in an earlier bundle" in err) == (5, True)


def test_a_receipt_fetched_alone_says_who_signed_its_block(tmp_path: Path, api: Api) -> None:
    own, other = SIGNER, Signer(b"x" * 32)
    made = api.submit()
    node_id = api.register()
    for _ in range(2):
        block = api.claimed(node_id)
        assert api.attempt(block, "report", receipts=receipts_of(block, node_id)).status_code == 200
    trials = [row["id"] for row in api.get(f"/v1/ablations/{made['id']}/trials").json()["items"]]
    path, every = tmp_path / "receipt.json", tmp_path / "receipts.json"
    assert ablate("offline", "receipts", trials[1], "--output", path)[0] == 0
    code, out, err = ablate("offline", "verify", path, "--key", own.key)
    assert (code, out.count("good"), f"signed by {own.key} of node-a" in err) == (0, 1, True)
    code, out, _err = ablate("offline", "verify", path, "--key", other.key)
    assert (code, f"is signed by {own.key}, which is none of the given keys" in out) == (6, True)
    assert ablate("offline", "receipts", made["id"], "--output", every)[0] == 0
    code, out, err = ablate("offline", "verify", every)
    assert (code, out.count("good"), f"6 receipts: signed by {own.key} of node-a" in err) == (0, 6, True)
    for called, count in ((made["name"], 6), (made["id"][:-2], 6), ("latest", 6), ("latest/1/psiv-on", 1)):
        code, out, err = ablate("offline", "verify", called, "--key", own.key)
        assert (code, out.count("good  "), f"signed by {own.key} of node-a" in err) == (0, count, True), (called, err)
    assert "good  latest/1/psiv-on" in out
    code, out, err = ablate("offline", "verify", "latest/1", "--key", other.key)
    assert (code, out.count("DAMAGED")) == (6, 1)
    code, out, err = ablate("offline", "verify", "unheard-of")
    error = " ".join(err.split())
    assert (code, "there is no file 'unheard-of'; as an ablation or a trial: " in error) == (5, True)
    good = json.loads(path.read_text())
    for edit, message in EDITED_SIGNATURES.items():
        path.write_text(json.dumps(edit(good, other)))
        code, out, _err = ablate("offline", "verify", path)
        assert (code, message in out) == (6, True), (message, out)


def test_a_receipt_of_an_import_has_no_signature_of_its_own(tmp_path: Path, api: Api) -> None:
    own = Signer(b"o" * 32)
    folder = write_folder(make_bundle(FILE, [0, 1], signer=own), tmp_path / "bundle")
    assert ablate("offline", "import", folder, "--trust", own.key)[0] == 0
    code, out, err = ablate("offline", "verify", FILE.ablation_id)
    assert (code, out.startswith("UNSIGNED"), "6 receipts: signed by nobody" in err) == (0, True, True)
    _code, out, _err = ablate("verdict", folder, "--json")
    assert [one["key"] for one in json.loads(out)["circumstances"]["signers"]] == [own.key]


def _another_digest(receipt: dict[str, Any], _: Signer) -> dict[str, Any]:
    digests = ["sha256:other", *receipt["signature"]["receipts"][1:]]
    return {**receipt, "signature": {**receipt["signature"], "receipts": digests}}


def _moved(receipt: dict[str, Any], _: Signer) -> dict[str, Any]:
    return {**receipt, "signature": {**receipt["signature"], "receipts": receipt["signature"]["receipts"][::-1][1:]}}


def _by_another(receipt: dict[str, Any], other: Signer) -> dict[str, Any]:
    by = {**receipt["signature"]["by"], "key": other.key}
    return {**receipt, "signature": {**receipt["signature"], "by": by}}


EDITED_SIGNATURES = {
    _another_digest: "does not fit key",
    _moved: "its signature covers other receipts",
    _by_another: "does not fit key",
    lambda receipt, _: {**receipt, "wall_s": 1.0}: "was altered",
    lambda receipt, _: {**receipt, "signature": {"node": "a"}}: "not a signature",
}
"""What somebody does to a signed receipt, and what is said of it."""
