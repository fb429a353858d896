"""A calibration in a file, with the signed receipts of its A/A blocks: anybody can compute it again."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from pydantic import ValidationError

from ablate.experiments.analysis.guards import block_problems
from ablate.experiments.analysis.noise.calibrate import aa_block, calibration_problems, key_for, metric_of
from ablate.experiments.block_numbers import block_name
from ablate.experiments.documents import Frozen, first_problem
from ablate.experiments.errors import ReceiptError
from ablate.experiments.records.bundle import Bundle, BundledBlock
from ablate.experiments.records.calibration import AABlock, Calibration
from ablate.experiments.records.receipt_check import BlockSignature, SignedReceipt, verify_signed
from ablate.experiments.records.receipts import Receipt

KIND: Literal["ablate calibration"] = "ablate calibration"


class CalibrationFile(Frozen):
    """A calibration with its evidence."""

    kind: Literal["ablate calibration"] = KIND
    calibration: Calibration
    receipts: tuple[tuple[SignedReceipt, SignedReceipt], ...]
    """Of each A/A block: the baseline, and its repeat."""


def calibration_file(calibration: Calibration, bundles: Iterable[Bundle]) -> CalibrationFile:
    """Return the file of a calibration from these bundles."""
    signed = {
        trial.receipt.digest: SignedReceipt(
            **trial.receipt.model_dump(), signature=_signature(bundle.nodes[block.attempt.node_id].name, block)
        )
        for bundle in bundles
        for block in bundle.blocks
        for trial in block.trials
    }
    pairs = ((signed[block.receipts[0]], signed[block.receipts[1]]) for block in calibration.samples)
    return CalibrationFile(calibration=calibration, receipts=tuple(pairs))


def _signature(node: str, block: BundledBlock) -> BlockSignature | None:
    signature = block.attempt.signature
    if signature is None:
        return None
    digests = tuple(trial.receipt.digest for trial in block.trials)
    number = block.attempt.attempt_no if signature.numbered else None
    return BlockSignature(node=node, receipts=digests, by=signature, number=number)


def read_calibration(data: bytes) -> Calibration:
    """Return the calibration in a file. Raises ReceiptError when it does not follow from its receipts."""
    try:
        values = json.loads(data)
        if not isinstance(values, dict) or values.get("kind") != KIND:
            raise ReceiptError(f"is neither a bundle nor a calibration: its kind is not '{KIND}'")
        calibration, pairs = Calibration.model_validate(values.get("calibration")), values.get("receipts")
    except (ValueError, RecursionError) as error:
        why = first_problem(error) if isinstance(error, ValidationError) else str(error)
        raise ReceiptError(f"is neither a bundle nor a calibration: {why}") from error
    _refuse(calibration_problems(calibration))
    if not isinstance(pairs, list) or len(pairs) != len(calibration.samples):
        raise ReceiptError(f"has no pair of receipts for each of its {len(calibration.samples)} A/A blocks")
    for block, pair in zip(calibration.samples, pairs, strict=True):
        _refuse([f"A/A {block_name(block.block_index)}: {one}" for one in _block_problems(calibration, block, pair)])
    return calibration


def _block_problems(calibration: Calibration, block: AABlock, pair: Any) -> Iterator[str]:
    """Find contradictions of an A/A block to its signed receipts."""
    if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(one, Mapping) for one in pair):
        yield "has no pair of receipts"
        return
    checks = [verify_signed(one) for one in pair]
    problems = [problem for found, _ in checks for problem in found]
    if problems:
        yield problems[0]
        return
    keys = {None if signature is None else signature.by.key for _, signature in checks}
    baseline, repeat = (Receipt.model_validate({n: v for n, v in one.items() if n != "signature"}) for one in pair)
    if baseline.digests.arm != repeat.digests.arm or baseline.seed != repeat.seed:
        yield "its trials do not repeat each other"
    yield from block_problems((baseline, repeat))
    metric, key = metric_of(calibration.key), calibration.key
    if key_for(baseline, recipe=key.recipe, metric=metric) != key:
        yield "was measured on another device, workload or software than the calibration names"
    again = aa_block(
        metric,
        baseline,
        repeat,
        source=block.source,
        margin_pct=block.margin_pct,
        signed_by=keys.pop() if len(keys) == 1 else None,
    )
    if again != block:
        yield "does not follow from its receipts and their signatures"


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ReceiptError(problems[0])
