"""Every receipt and bundle that was ever stored verifies, by the rules of its schema version."""

import gzip
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.digest import digest
from experiments.errors import BundleError
from experiments.records.bundle_files import read_bundle_files
from experiments.records.bundle_reader import open_bundle, verify_bundle
from experiments.records.receipt_check import verify, verify_signed
from experiments.records.receipts import SCHEMA_VERSION
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


OF_VERSION_1 = STORE / "2026-11-21-h200-scan-gates" / "bundle.tar"
OF_VERSION_2 = STORE / "2026-11-23-h200-aa" / "gates.tar.gz"


@pytest.mark.parametrize("path", BUNDLES, ids=lambda path: path.relative_to(STORE).as_posix())
def test_stored_bundle_verifies(path: Path) -> None:
    verify_bundle(read_bundle_files(path))


def test_there_are_bundles() -> None:
    assert len(BUNDLES) >= 15


def test_stored_receipts_outside_bundles_verify() -> None:
    receipts = list(_single())
    assert len(receipts) >= 46
    assert {str(path): problems for path, receipt in receipts if (problems := verify_signed(receipt)[0])} == {}


@pytest.mark.parametrize("number", range(18))
def test_altered_summary_of_version_1_is_reported(number: int) -> None:
    receipt = _bundled(OF_VERSION_1, number)
    assert receipt["schema_version"] == 1
    assert verify(receipt) == []
    for name in ("tokens_per_s", "step_s_mean", "loss_final", "outlier_steps", "step_s_median", "timed_steps"):
        altered = {**receipt, "summary": {**receipt["summary"], name: receipt["summary"][name] + 1}}
        assert "was altered" in verify(altered)[0]
        assert f"summary.{name}" in verify(_sealed(altered))[0]
    assert "version 1" in verify(_sealed({**receipt, "steps": []}))[0]
    assert "version 1" in verify({"schema_version": 1})[0]


def test_altered_file_of_a_bundle_of_version_1_is_reported() -> None:
    files = dict(read_bundle_files(OF_VERSION_1))
    name = next(name for name in files if name.endswith("log.txt"))
    with pytest.raises(BundleError, match="was altered"):
        verify_bundle({**files, name: b"x"})
    with pytest.raises(BundleError, match="receipts verify"):
        open_bundle(files)


@pytest.mark.parametrize("name", ["dtype", "remat", "pipeline_stages", "tma", "psiv_cache", "micro_batch"])
def test_altered_reading_of_version_2_is_reported(name: str) -> None:
    receipt = _bundled(OF_VERSION_2, 0)
    assert receipt["schema_version"] == 2
    stored = receipt["gates"][name]
    for change in ({"observed": "other"}, {"live": not stored["live"]}, {"how": "fact of nothing"}):
        altered = _sealed({**receipt, "gates": {**receipt["gates"], name: {**stored, **change}}})
        assert any(problem.startswith(f"gates.{name} says") for problem in verify(altered))


def test_rules_of_an_earlier_version_hold_only_there() -> None:
    receipt = _sealed({**_bundled(OF_VERSION_2, 0), "schema_version": SCHEMA_VERSION})
    assert any(problem.startswith("gates.remat says") for problem in verify(receipt))


def test_gates_read_as_when_the_schema_version_began() -> None:
    assert json.loads(GOLDEN.read_text(encoding="utf-8"))["schema_version"] == SCHEMA_VERSION, "run `make golden`"
    assert not changed(), ADVICE
