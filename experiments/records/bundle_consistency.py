"""Whether the records of a bundle tell one story: receipts against their node, attempts against each other.

A node that signs what it likes can still write all of them alike; what only one of them says is found here.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.block_numbers import block_name
from experiments.errors import SpecProblem
from experiments.records.bundle import Attempt, BrokenAttempt, BundledBlock, NodeRecord, block_folder
from experiments.records.bundle_paths import BLOCK
from experiments.records.identity import mismatches
from experiments.records.receipt_slices import slice_problems
from experiments.records.receipts import Receipt


def consistency_problems(
    blocks: Mapping[str, BundledBlock], broken: Sequence[BrokenAttempt], nodes: Mapping[str, NodeRecord]
) -> list[SpecProblem]:
    """Return what contradicts something else, by the file that says it."""
    found = list(_number_problems([block.attempt for block in blocks.values()], broken))
    for path, block in blocks.items():
        details = [
            *_node_problems(block, nodes[block.attempt.node_id]),
            *slice_problems([trial.receipt for trial in block.trials]),
        ]
        found += [SpecProblem(pointer=path, detail=detail) for detail in details]
    return found


def _node_problems(block: BundledBlock, node: NodeRecord) -> Iterator[str]:
    """Compare what receipts say about their machine with the machine."""
    registered = node.registration
    devices = {(device.name, device.serial) for device in registered.devices}
    expected = {
        "digests": {"code": registered.code_digest},
        "environment": {"node_class": registered.node_class, "versions": dict(registered.versions)},
    }
    for trial in block.trials:
        receipt = trial.receipt
        for where, detail in mismatches(_plain(receipt), expected):
            yield f"arm '{receipt.arm}': {where} {detail}, which node {node.node_id} says"
        device = (receipt.environment.device_name, receipt.environment.device_serial)
        if device not in devices:
            yield f"arm '{receipt.arm}' ran on {device}; node {node.node_id} has {sorted(devices, key=str)}"


def _plain(receipt: Receipt) -> dict[str, Any]:
    return receipt.model_dump(mode="json", include={"digests", "environment"})


def _number_problems(done: Sequence[Attempt], broken: Sequence[BrokenAttempt]) -> Iterator[SpecProblem]:
    """Find attempts that are missing: a block's attempts are counted from 1, and the last one finished it."""
    for index in sorted({attempt.index for attempt in [*done, *broken]}):
        told = sorted(record.attempt_no for record in broken if record.index == index)
        numbers = told + [attempt.attempt_no for attempt in done if attempt.index == index]
        if numbers != list(range(1, len(numbers) + 1)):
            detail = f"{block_name(index)} has attempts {numbers}; expected each from 1 on once, the finished one last"
            yield SpecProblem(pointer=f"{block_folder(index)}/{BLOCK}", detail=detail)
