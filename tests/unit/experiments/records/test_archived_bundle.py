"""Bundles of an older schema are archives: they are refused by their version, not misread."""

from pathlib import Path

import pytest

from experiments.errors import BundleError
from experiments.records.bundle_files import read_bundle_files
from experiments.records.bundle_reader import open_bundle

ARCHIVE = Path(__file__).parents[4] / "docs" / "receipts" / "2026-11-21-h200-scan-gates" / "bundle.tar"


def test_the_bundle_of_the_first_schema_is_refused_by_its_version() -> None:
    with pytest.raises(BundleError) as refused:
        open_bundle(read_bundle_files(ARCHIVE))
    (problem,) = refused.value.problems
    assert (problem.pointer, problem.detail) == ("manifest.json", "schema_version is 1; this program reads 2")
