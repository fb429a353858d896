"""Signatures of a bundle: every block, every broken attempt and the manifest against the keys of its nodes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from experiments.errors import SpecProblem
from experiments.records.bundle import Attempt, BrokenAttempt, Manifest, NodeRecord, attempt_statement
from experiments.records.bundle_paths import MANIFEST
from experiments.records.plan_file import PlanFile
from experiments.records.signing import Signature, manifest_statement, signature_problem


@dataclass(frozen=True, kw_only=True)
class SignedRecord:
    """What a node signs of a bundle besides the manifest."""

    path: str
    attempt: Attempt
    receipts: tuple[str, ...] = ()
    """Digests, in running order."""


def signature_problems(
    manifest: Manifest, records: Sequence[SignedRecord], nodes: Mapping[str, NodeRecord], file: PlanFile
) -> list[SpecProblem]:
    """Return whose signature does not fit, or is not the one of the node that ran the block."""
    whole = manifest_statement(manifest.digest)
    found = [SpecProblem(pointer=MANIFEST, detail=detail) for detail in _unfit(manifest.signature, whole)]
    for record in records:
        statement = attempt_statement(file, record.attempt, record.receipts)
        node = nodes[record.attempt.node_id]
        found += [SpecProblem(pointer=record.path, detail=detail) for detail in _of_record(record, node, statement)]
    return found


def _of_record(record: SignedRecord, node: NodeRecord, statement: bytes) -> Iterator[str]:
    """Find what is wrong; an attempt that was killed may be told by the node that goes on with the bundle."""
    signature, key = record.attempt.signature, node.registration.public_key
    signed_by = None if signature is None else signature.key
    told_later = isinstance(record.attempt, BrokenAttempt) and signature is not None
    if signed_by != key and not told_later:
        yield f"is signed by {signed_by or 'nobody'}; the key of node {node.node_id} is {key or 'none'}"
    else:
        yield from _unfit(signature, statement)


def _unfit(signature: Signature | None, statement: bytes) -> Iterator[str]:
    problem = None if signature is None else signature_problem(signature, statement)
    if problem is not None:
        yield f"its signature {problem}"


def unsigned_files(manifest: Manifest, records: Sequence[SignedRecord]) -> tuple[str, ...]:
    """Return the files that should be signed and are not."""
    whole = () if manifest.signature is not None else (MANIFEST,)
    return (*whole, *(record.path for record in records if record.attempt.signature is None))
