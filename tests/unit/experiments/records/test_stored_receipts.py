"""Every receipt and bundle that was ever stored verifies; those of release 0.1 by digests and signatures alone."""

import gzip
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ablate.experiments.digest import digest, digest_bytes
from ablate.experiments.errors import BundleError
from ablate.experiments.records.bundle_files import MANIFEST, read_bundle_files
from ablate.experiments.records.bundle_reader import open_bundle, verify_bundle
from ablate.experiments.records.earlier_release import EarlierBundle
from ablate.experiments.records.receipt_check import verify, verify_signed
from ablate.experiments.records.receipts import SCHEMA_VERSION
from tests.golden.freeze_readings import ADVICE, GOLDEN, changed

ROOT = Path(__file__).resolve().parents[4]
STORE = ROOT / "docs" / "receipts"
BUNDLES = sorted(path for path in STORE.rglob("*.tar*") if "bundle" in path.name or path.name.endswith(".tar.gz"))


def _receipts(content: Any) -> Iterator[dict[str, Any]]:
    if isinstance(content, dict) and {"schema_version", "ids", "digest"} <= content.keys():
        yield content
    elif isinstance(content, dict | list):
        for part in content.values() if isinstance(content, dict) else content:
            yield from _receipts(part)


def _single() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the receipts that are stored outside bundles."""
    for path in sorted(STORE.rglob("*.json*")):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = data.splitlines() if ".jsonl" in path.name else [data]
        for line in filter(None, lines):
            yield from ((path, receipt) for receipt in _receipts(json.loads(line)))


def _bundled(path: Path, number: int) -> dict[str, Any]:
    with tarfile.open(path) as archive:
        names = sorted(name for name in archive.getnames() if name.endswith("/receipt.json"))
        member = archive.extractfile(names[number])
        assert member is not None
        receipt: dict[str, Any] = json.load(member)
    return receipt


def _sealed(receipt: dict[str, Any]) -> dict[str, Any]:
    return {**receipt, "digest": digest({name: value for name, value in receipt.items() if name != "digest"})}


OF_VERSION_1 = ROOT / "tests" / "golden" / "bundle-of-version-1.tar.gz"
OF_VERSION_2 = STORE / "2026-11-23-h200-aa" / "gates.tar.gz"


@pytest.mark.parametrize("path", BUNDLES, ids=lambda path: path.relative_to(STORE).as_posix())
def test_stored_bundle_verifies(path: Path) -> None:
    verify_bundle(read_bundle_files(path))


def test_stored_bundle_of_version_1_verifies() -> None:
    verify_bundle(read_bundle_files(OF_VERSION_1))


def test_there_are_bundles() -> None:
    assert len(BUNDLES) >= 15


def test_stored_receipts_outside_bundles_verify() -> None:
    receipts = list(_single())
    assert len(receipts) >= 40
    assert {
        str(path): problems for path, receipt in receipts if (problems := verify_signed(receipt, any_release=True)[0])
    } == {}


def test_an_altered_receipt_of_release_0_1_is_reported() -> None:
    receipt = _bundled(OF_VERSION_1, 0)
    assert verify_signed(receipt, any_release=True)[0] == []
    for name in ("tokens_per_s", "step_s_mean", "loss_final"):
        altered = {**receipt, "summary": {**receipt["summary"], name: receipt["summary"][name] + 1}}
        assert "was altered" in verify_signed(altered, any_release=True)[0][0]
    assert "this program reads" in verify(receipt)[0], "nothing judges it"


@pytest.mark.parametrize("version", [0, 4, 5, True, "3", None])
def test_only_versions_of_release_0_1_escape_the_other_checks(version: object) -> None:
    receipt = _sealed({**_bundled(OF_VERSION_1, 0), "schema_version": version})
    assert verify_signed(receipt, any_release=True)[0] != []


def _edited(
    files: dict[str, bytes], ending: str, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, bytes]:
    """Return a bundle with one JSON file changed, and a manifest without signature that fits it."""
    path = next(name for name in sorted(files) if name.endswith(ending))
    data = json.dumps(change(json.loads(files[path]))).encode()
    manifest = json.loads(files[MANIFEST])
    manifest["files"][path] = {"digest": digest_bytes(data), "bytes": len(data)}
    manifest = {name: value for name, value in manifest.items() if name not in ("digest", "signature")}
    sealed = {**manifest, "digest": digest(manifest)}
    return {**files, path: data, MANIFEST: json.dumps(sealed).encode()}


@pytest.mark.parametrize(
    ("ending", "change", "reason"),
    [
        ("receipt.json", lambda receipt: {**receipt, "wall_s": 1.0}, "was altered"),
        ("receipt.json", lambda receipt: [receipt], "is no file of a bundle of release 0.1"),
        ("manifest.json", lambda manifest: {**manifest, "digest": "sha256:x"}, "was altered"),
    ],
)
def test_an_edit_of_a_bundle_of_release_0_1_with_a_new_manifest_is_reported(
    ending: str, change: Callable[[dict[str, Any]], dict[str, Any]], reason: str
) -> None:
    files = dict(read_bundle_files(OF_VERSION_2))
    with pytest.raises(BundleError, match=reason):
        verify_bundle(_edited(files, ending, change))


def test_a_bundle_of_release_0_1_says_who_signed_and_is_judged_by_nobody() -> None:
    files = dict(read_bundle_files(OF_VERSION_2))
    bundle = verify_bundle(files)
    assert isinstance(bundle, EarlierBundle)
    assert bundle.key is not None
    edited = _edited(files, "receipt.json", lambda receipt: _sealed({**receipt, "wall_s": 1.0}))
    assert verify_bundle(edited) == EarlierBundle(key=None), "whoever edits it loses the signature"
    signature = json.loads(files[MANIFEST])["signature"]
    kept = json.dumps({**json.loads(edited[MANIFEST]), "signature": signature}).encode()
    with pytest.raises(BundleError, match="its signature does not fit"):
        verify_bundle({**edited, MANIFEST: kept})
    unsigned = verify_bundle(read_bundle_files(OF_VERSION_1))
    assert isinstance(unsigned, EarlierBundle)
    assert unsigned.key is None
    name = next(name for name in files if name.endswith("log.txt"))
    with pytest.raises(BundleError, match="was altered"):
        verify_bundle({**files, name: b"x"})
    with pytest.raises(BundleError, match="this program judges"):
        open_bundle(files)


def test_gates_read_as_when_the_schema_version_began() -> None:
    assert json.loads(GOLDEN.read_text(encoding="utf-8"))["schema_version"] == SCHEMA_VERSION, "run `make golden`"
    assert not changed(), ADVICE
