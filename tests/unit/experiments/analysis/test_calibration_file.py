"""A calibration file carries the signed receipts of its A/A blocks, so nobody can change its numbers unseen."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from ablate.experiments.analysis.noise.calibrate import calibrate, calibrations_of
from ablate.experiments.analysis.noise.calibration_file import calibration_file, read_calibration
from ablate.experiments.errors import ReceiptError
from ablate.experiments.records.bundle import Bundle
from ablate.experiments.records.bundle_reader import open_bundle
from ablate.experiments.records.calibration import Calibration
from ablate.experiments.records.receipt_check import SignedReceipt
from ablate.experiments.records.receipts import seal
from ablate.experiments.records.signing import Signer
from tests.bundles import make_bundle, make_file

NODE, STRANGER = Signer(b"n" * 32), Signer(b"s" * 32)
FILE = make_file(purpose="calibration", variants={"repeat": {"gates": {"chunk_size": 16}}})
Values = dict[str, Any]


def calibration_of(bundle: Bundle) -> Calibration:
    receipts = [trial.receipt for block in bundle.blocks for trial in block.trials]
    (made,) = calibrations_of(FILE.plan, FILE.spec, receipts, bundle.signed_by)
    return made


def written(bundle: Bundle) -> Values:
    return dict(json.loads(calibration_file(calibration_of(bundle), [bundle]).model_dump_json()))


BUNDLE = open_bundle(make_bundle(FILE, signer=NODE))
ORIGINAL = written(BUNDLE)


def read(values: Values) -> Calibration:
    return read_calibration(json.dumps(values).encode())


def test_a_file_is_read_with_the_keys_that_signed_its_blocks() -> None:
    made = read(ORIGINAL)
    assert [block.signed_by for block in made.samples] == [NODE.key] * 6
    assert made == calibration_of(BUNDLE)


def with_samples(values: Values, change: Callable[[Values], Values]) -> Values:
    """Change every A/A block and compute the calibration again, as a forger would."""
    old = Calibration.model_validate(values["calibration"])
    samples = [type(one).model_validate(change(one.model_dump(mode="json"))) for one in old.samples]
    return {**values, "calibration": calibrate(old.key, samples).model_dump(mode="json")}


def with_receipt(values: Values, change: Callable[[Values], None]) -> Values:
    values = json.loads(json.dumps(values))
    receipt = values["receipts"][0][1]
    signature = receipt.pop("signature")
    change(receipt)
    again = seal({name: value for name, value in receipt.items() if name != "digest"})
    values["receipts"][0][1] = SignedReceipt(**again.model_dump(), signature=signature).model_dump(mode="json")
    return dict(values)


def unsigned(values: Values) -> Values:
    pairs = [[{**one, "signature": None} for one in pair] for pair in values["receipts"]]
    return {**values, "receipts": pairs}


FORGED: dict[str, tuple[Values, str]] = {
    "less noise": (with_samples(ORIGINAL, lambda one: {**one, "difference": one["difference"] + 1e-3}), "follow from"),
    "a later date": (with_samples(ORIGINAL, lambda one: {**one, "started_at": "2026-11-25T12:00:00Z"}), "follow from"),
    "another signer": (with_samples(ORIGINAL, lambda one: {**one, "signed_by": STRANGER.key}), "follow from"),
    "a digest of the calibration": (
        {**ORIGINAL, "calibration": {**ORIGINAL["calibration"], "sd_upper_pct": 9.0}},
        "was altered",
    ),
    "a faster receipt": (
        with_receipt(ORIGINAL, lambda one: one["memory"].update(peak_reserved_bytes=1)),
        "covers other receipts",
    ),
    "without signatures": (unsigned(ORIGINAL), "follow from"),
    "without receipts": ({**ORIGINAL, "receipts": []}, "no pair of receipts"),
    "one receipt a block": ({**ORIGINAL, "receipts": [pair[:1] for pair in ORIGINAL["receipts"]]}, "no pair of rec"),
    "three receipts a block": ({**ORIGINAL, "receipts": [[*pair, pair[0]] for pair in ORIGINAL["receipts"]]}, "no pai"),
    "numbers for receipts": ({**ORIGINAL, "receipts": [[1, 2] for _ in ORIGINAL["receipts"]]}, "no pair of receipts"),
    "names for pairs": ({**ORIGINAL, "receipts": ["ab" for _ in ORIGINAL["receipts"]]}, "no pair of receipts"),
    "receipts exchanged": ({**ORIGINAL, "receipts": [pair[::-1] for pair in ORIGINAL["receipts"]]}, "follow from"),
    "the calibration alone": (ORIGINAL["calibration"], "is neither a bundle nor a calibration"),
    "not a calibration": ({}, "is neither a bundle nor a calibration"),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_file_is_rejected(what: str) -> None:
    values, words = FORGED[what]
    with pytest.raises(ReceiptError, match=words):
        read(values)


def test_unsigned_blocks_name_nobody() -> None:
    nobody = written(open_bundle(make_bundle(FILE)))
    assert {block.signed_by for block in read(nobody).samples} == {None}
