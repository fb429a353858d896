"""The bundle, written by `ablate offline exec` and read by `ablate offline import`.

    manifest.json                      digests of all other files, and its own
    plan.json                          the plan file, unchanged
    nodes/<node id>.json               a machine
    blocks/<number>/block.json         a finished block: ids, node, times; blocks count from 1 here
    blocks/<number>/<place>-<arm>/     receipt.json and log.txt of one trial
    attempts/<attempt id>.json         a broken attempt at a block

A bundle is of one node, which signs the manifest. Several bundles of one plan are joined at their import.
The folder `work` beside them belongs to a running `ablate offline exec` and is not part of the bundle.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from ablate.experiments.block_numbers import block_name, block_number, place_number
from ablate.experiments.digest import digest_bytes
from ablate.experiments.documents import Frozen, seal
from ablate.experiments.errors import BundleError, SpecProblem
from ablate.experiments.ids import id_pattern
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.circumstances import AttemptRecord, BlockSigner
from ablate.experiments.records.messages import NodeRegistration
from ablate.experiments.records.plan_file import PlanFile
from ablate.experiments.records.receipts import Receipt
from ablate.experiments.records.signing import Signature
from ablate.experiments.retries import Break, may_retry

KIND: Literal["ablate bundle"] = "ablate bundle"
SCHEMA_VERSION = 4

_AttemptId = Annotated[str, Field(pattern=id_pattern("att"))]
_NodeId = Annotated[str, Field(pattern=id_pattern("nod"))]


class FileEntry(Frozen):
    """Digest and size of one file."""

    digest: str
    bytes: int


class Manifest(Frozen):
    """All files of a bundle except the manifest."""

    kind: Literal["ablate bundle"] = KIND
    schema_version: int = SCHEMA_VERSION
    ablation_id: str
    plan_digest: str
    files: Mapping[str, FileEntry]
    """By path below the bundle, with forward slashes."""
    digest: str
    """Of everything above; identifies the bundle."""
    signature: Signature | None = None
    """Of the node that wrote the bundle; None if it could not sign."""


class NodeRecord(Frozen):
    """A machine that ran blocks of the bundle."""

    node_id: _NodeId
    name: Annotated[str, Field(pattern="^[ -~]{1,120}$")]
    registration: NodeRegistration


class Attempt(Frozen):
    """One run of a block, from start to end, on one node."""

    index: int = Field(ge=0)
    """Of the block in the plan, from 0."""
    attempt_id: _AttemptId
    attempt_no: int = Field(ge=1)
    node_id: _NodeId
    started_at: AwareDatetime
    ended_at: AwareDatetime

    @property
    def seconds(self) -> float:
        """Wall seconds from start to end."""
        return (self.ended_at - self.started_at).total_seconds()


class BrokenAttempt(Attempt):
    """An attempt without a result: its block runs again as a whole, or is missing."""

    failure_class: FailureClass
    arm: str | None = None
    """Arm whose trial broke the block; None when unknown."""
    message: str

    @property
    def as_break(self) -> Break:
        """The attempt for the rule of retries."""
        return Break(block_index=self.index, failure_class=self.failure_class, arm=self.arm)


def breaks(broken: Sequence[BrokenAttempt]) -> tuple[Break, ...]:
    """Return the attempts for the rule of retries."""
    return tuple(record.as_break for record in broken)


def used_up_by(broken: Sequence[BrokenAttempt], index: int) -> BrokenAttempt | None:
    """Return the attempt after which block `index` may not run again; None while it may. `broken` is in order."""
    attempts = [record for record in broken if record.index == index]
    if not attempts or may_retry(breaks(attempts), attempts[-1].as_break):
        return None
    return attempts[-1]


@dataclass(frozen=True, kw_only=True)
class BundledTrial:
    """One trial of a finished block."""

    trial_id: str
    receipt: Receipt
    log: str


@dataclass(frozen=True, kw_only=True)
class BundledBlock:
    """A finished block with its trials in running order."""

    attempt: Attempt
    trials: tuple[BundledTrial, ...]


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A verified bundle, or several joined bundles of one plan."""

    digests: tuple[str, ...]
    """Of the manifests, sorted."""
    plan_file: PlanFile
    nodes: Mapping[str, NodeRecord]
    blocks: tuple[BundledBlock, ...]
    """By index."""
    broken: tuple[BrokenAttempt, ...]
    signed_as: Mapping[str, str]
    """Keys of the signed manifests, by the ids of their nodes."""
    is_signed: bool
    """Whether every manifest is signed."""

    @property
    def keys(self) -> frozenset[str]:
        """Keys of all signatures in it."""
        return frozenset(self.signed_as.values())

    @property
    def signers(self) -> tuple[BlockSigner, ...]:
        """Nodes and keys that signed for the finished blocks."""
        blocks: dict[str, list[int]] = {}
        for block in self.blocks:
            blocks.setdefault(block.attempt.node_id, []).append(block.attempt.index)
        return tuple(
            BlockSigner(node=node, name=self.nodes[node].name, key=self.signed_as.get(node), blocks=tuple(own))
            for node, own in blocks.items()
        )

    @property
    def signed_by(self) -> dict[int, str]:
        """Keys that signed for the finished blocks, by index; unsigned ones are absent."""
        return {index: signer.key for signer in self.signers if signer.key is not None for index in signer.blocks}

    @property
    def missing(self) -> tuple[int, ...]:
        """Indices of planned blocks that are not in the bundle."""
        here = {block.attempt.index for block in self.blocks}
        return tuple(block.index for block in self.plan_file.plan.blocks if block.index not in here)


def attempt_records(bundle: Bundle) -> tuple[AttemptRecord, ...]:
    """Return the attempts of `bundle` without receipts that count, by block and number."""
    return tuple(
        AttemptRecord(
            block_index=record.index,
            number=record.attempt_no,
            failure_class=record.failure_class,
            arm=record.arm,
            message=record.message,
            node=bundle.nodes[record.node_id].name,
        )
        for record in sorted(bundle.broken, key=lambda one: (one.index, one.attempt_no, one.attempt_id))
    )


def block_folder(index: int) -> str:
    """Return the folder of the finished block `index`."""
    return f"blocks/{block_number(index):04d}"


def trial_folder(index: int, position: int, arm: str) -> str:
    """Return the folder of one trial."""
    return f"{block_folder(index)}/{place_number(position)}-{arm}"


def make_manifest(file: PlanFile, contents: Mapping[str, bytes]) -> Manifest:
    """Return the manifest of a bundle with these files."""
    entries = {path: FileEntry(digest=digest_bytes(data), bytes=len(data)) for path, data in sorted(contents.items())}
    return seal(Manifest(ablation_id=file.ablation_id, plan_digest=file.digest, files=entries, digest=""))


def join_bundles(bundles: Sequence[Bundle]) -> Bundle:
    """Return one bundle with the blocks of several. Raises BundleError unless they share one plan and no block."""
    first = bundles[0]
    blocks: dict[int, BundledBlock] = {}
    for number, bundle in enumerate(bundles):
        where = f"bundle {number + 1}"
        if bundle.plan_file.digest != first.plan_file.digest:
            raise BundleError([SpecProblem(pointer=where, detail="has another plan than bundle 1")])
        for block in bundle.blocks:
            index = block.attempt.index
            if index in blocks:
                detail = f"{block_name(index)} is in an earlier bundle; a block counts once"
                raise BundleError([SpecProblem(pointer=where, detail=detail)])
            blocks[index] = block
    return Bundle(
        digests=tuple(sorted(digest for bundle in bundles for digest in bundle.digests)),
        plan_file=first.plan_file,
        nodes={key: node for bundle in bundles for key, node in bundle.nodes.items()},
        blocks=tuple(blocks[index] for index in sorted(blocks)),
        broken=tuple(record for bundle in bundles for record in bundle.broken),
        signed_as={node: key for bundle in bundles for node, key in bundle.signed_as.items()},
        is_signed=all(bundle.is_signed for bundle in bundles),
    )
