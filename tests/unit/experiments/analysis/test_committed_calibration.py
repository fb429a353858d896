"""The committed A/A blocks of an H200: their bundles verify and give the committed calibration, which admits it."""

from pathlib import Path

import pytest

from experiments.analysis.noise.admission import keep_ledger, standing_problems
from experiments.analysis.noise.calibrate import calibration_problems, calibrations_of, join_calibrations, seconds
from experiments.records import receipt_check
from experiments.records.bundle_files import read_bundle_files
from experiments.records.bundle_reader import open_bundle
from experiments.records.calibration import Calibration

FOLDER = Path(__file__).parents[4] / "docs/receipts/2026-11-22-h200-aa"


@pytest.fixture(scope="module")
def committed() -> Calibration:
    return Calibration.model_validate_json((FOLDER / "calibration.json").read_bytes())


def test_its_numbers_follow_from_its_samples_and_admit(committed):
    assert calibration_problems(committed) == []
    assert list(standing_problems(committed, seconds(committed.measured_at))) == []
    assert (committed.blocks, committed.key.node_class, committed.key.recipe) == (24, "h200", "hybrid-ref-h200")
    ledger = keep_ledger([committed])
    assert (ledger.ablations, ledger.false_words) == (4, 0)


@pytest.fixture
def dtype_as_proved_then(monkeypatch):
    """Make the reading of gate dtype not again: when these blocks ran, the hidden states alone were its proof."""
    problems = receipt_check._gate_problems

    def others(receipt, config):
        return (problem for problem in problems(receipt, config) if not problem.startswith("gates.dtype"))

    monkeypatch.setattr(receipt_check, "_gate_problems", others)


@pytest.mark.usefixtures("dtype_as_proved_then")
def test_the_bundles_hold_these_blocks(committed):
    found = []
    for path in sorted(FOLDER.glob("aa?.tar.gz")):
        bundle = open_bundle(read_bundle_files(path))
        file, receipts = bundle.plan_file, [trial.receipt for block in bundle.blocks for trial in block.trials]
        found += calibrations_of(file.plan, file.spec, receipts)
    (joined,) = join_calibrations(found)
    assert joined == committed
