"""The bundle: what `ablate exec` leaves and `ablate import` takes, verified file by file.

    manifest.json                      digest of every other file, and its own
    plan.json                          the plan file, unchanged
    nodes/<node id>.json               the machine
    blocks/<number>/block.json         a finished block: ids, node, times; blocks count from 1 here, as people see them
    blocks/<number>/<place>-<arm>/     receipt.json and log.txt of one trial
    attempts/<attempt id>.json         an attempt at a block that broke

The folder `work` beside them belongs to a running `ablate exec` and is no part of the bundle.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AwareDatetime, Field, ValidationError

from experiments.block_numbers import block_name, block_number, place_number
from experiments.digest import digest_bytes
from experiments.documents import Frozen, first_problem, seal, seal_problem
from experiments.errors import BundleError, PlanFileError, SpecError, SpecProblem
from experiments.ids import id_pattern
from experiments.outcomes import FailureClass
from experiments.records.identity import claimed_fields, mismatches
from experiments.records.messages import NodeRegistration
from experiments.records.plan_file import PlanFile, read_plan_file
from experiments.records.receipts import Receipt, verify
from experiments.retries import may_retry

KIND: Literal["ablate bundle"] = "ablate bundle"
SCHEMA_VERSION = 1
MANIFEST, PLAN, BLOCK, RECEIPT, LOG = "manifest.json", "plan.json", "block.json", "receipt.json", "log.txt"

_Model = TypeVar("_Model", bound=Frozen)
_AttemptId = Annotated[str, Field(pattern=id_pattern("att"))]
_NodeId = Annotated[str, Field(pattern=id_pattern("nod"))]


class FileEntry(Frozen):
    """One file as it was written."""

    digest: str
    bytes: int


class Manifest(Frozen):
    """Every file of a bundle but itself."""

    kind: Literal["ablate bundle"] = KIND
    schema_version: int = SCHEMA_VERSION
    ablation_id: str
    plan_digest: str
    files: Mapping[str, FileEntry]
    """By path below the bundle, with forward slashes."""
    digest: str
    """Of everything above: it names the bundle."""


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
    """An attempt that told nothing about the arms: its block is run again whole, or is missing."""

    failure_class: FailureClass
    message: str


def used_up_by(broken: Sequence[BrokenAttempt], index: int) -> BrokenAttempt | None:
    """Return the attempt after which block `index` may not run again, None while it may; `broken` is in time order."""
    attempts = [record for record in broken if record.index == index]
    if not attempts or may_retry(len(attempts), attempts[-1].failure_class):
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
    """A verified bundle, or several of one plan joined."""

    digests: tuple[str, ...]
    """Of the manifests, sorted."""
    plan_file: PlanFile
    nodes: Mapping[str, NodeRecord]
    blocks: tuple[BundledBlock, ...]
    """By index."""
    broken: tuple[BrokenAttempt, ...]

    @property
    def missing(self) -> tuple[int, ...]:
        """Indices of planned blocks that are not here."""
        here = {block.attempt.index for block in self.blocks}
        return tuple(block.index for block in self.plan_file.plan.blocks if block.index not in here)


def block_folder(index: int) -> str:
    """Return the folder of the finished block `index`."""
    return f"blocks/{block_number(index):04d}"


def trial_folder(index: int, position: int, arm: str) -> str:
    """Return the folder of one trial."""
    return f"{block_folder(index)}/{place_number(position)}-{arm}"


def read_manifest(files: Mapping[str, bytes]) -> Manifest:
    """Return the manifest as it is. Raises BundleError when there is none."""
    return _read(Manifest, files, MANIFEST)


def make_manifest(file: PlanFile, contents: Mapping[str, bytes]) -> Manifest:
    """Return the manifest of a bundle with these files."""
    entries = {path: FileEntry(digest=digest_bytes(data), bytes=len(data)) for path, data in sorted(contents.items())}
    return seal(Manifest(ablation_id=file.ablation_id, plan_digest=file.digest, files=entries, digest=""))


def open_bundle(files: Mapping[str, bytes]) -> Bundle:
    """Verify the bundle whose files are `files`, by path. Raises BundleError that names every file that is not good."""
    manifest = read_manifest(files)
    _refuse(_manifest_problems(manifest, files))
    plan_file = _plan_file(manifest, files)
    nodes = {node.node_id: node for _, node in _read_all(NodeRecord, files, lambda path: path.startswith("nodes/"))}
    broken = tuple(record for _, record in _read_all(BrokenAttempt, files, lambda path: path.startswith("attempts/")))
    done = dict(_read_all(Attempt, files, lambda path: path.startswith("blocks/") and path.endswith(f"/{BLOCK}")))
    _refuse(_attempt_problems(done, broken, plan_file, nodes))
    reader = _BlockReader(plan_file, files)
    blocks = sorted((reader.block(path, record) for path, record in done.items()), key=lambda b: b.attempt.index)
    _refuse([*reader.problems, *_unexpected_files(files, reader.known)])
    order = tuple(sorted(broken, key=lambda record: (record.index, record.attempt_no)))
    return Bundle(digests=(manifest.digest,), plan_file=plan_file, nodes=nodes, blocks=tuple(blocks), broken=order)


def join(bundles: Sequence[Bundle]) -> Bundle:
    """Return one bundle of the blocks of several. Raises BundleError when they are not parts of one plan."""
    first = bundles[0]
    blocks: dict[int, BundledBlock] = {}
    for number, bundle in enumerate(bundles):
        where = f"bundle {number + 1}"
        if bundle.plan_file.digest != first.plan_file.digest:
            raise BundleError([SpecProblem(pointer=where, detail="is of another plan than bundle 1")])
        for block in bundle.blocks:
            index = block.attempt.index
            if index in blocks:
                detail = f"{block_name(index)} is in an earlier bundle, too; a block counts once"
                raise BundleError([SpecProblem(pointer=where, detail=detail)])
            blocks[index] = block
    return Bundle(
        digests=tuple(sorted(digest for bundle in bundles for digest in bundle.digests)),
        plan_file=first.plan_file,
        nodes={key: node for bundle in bundles for key, node in bundle.nodes.items()},
        blocks=tuple(blocks[index] for index in sorted(blocks)),
        broken=tuple(record for bundle in bundles for record in bundle.broken),
    )


def _refuse(problems: Sequence[SpecProblem]) -> None:
    if problems:
        raise BundleError(problems)


def _read(model: type[_Model], files: Mapping[str, bytes], path: str) -> _Model:
    if path not in files:
        raise BundleError([SpecProblem(pointer=path, detail="is missing")])
    try:
        return model.model_validate_json(files[path])
    except ValidationError as error:
        raise BundleError([SpecProblem(pointer=path, detail=first_problem(error))]) from error


def _read_all(
    model: type[_Model], files: Mapping[str, bytes], wanted: Callable[[str], bool]
) -> Iterator[tuple[str, _Model]]:
    for path in sorted(files):
        if wanted(path):
            yield path, _read(model, files, path)


def _manifest_problems(manifest: Manifest, files: Mapping[str, bytes]) -> list[SpecProblem]:
    if manifest.schema_version != SCHEMA_VERSION:
        detail = f"schema_version is {manifest.schema_version}; this program reads {SCHEMA_VERSION}"
        return [SpecProblem(pointer=MANIFEST, detail=detail)]
    extra = sorted(set(files) - set(manifest.files) - {MANIFEST})
    odd = [SpecProblem(pointer=path, detail="is in the bundle and not in the manifest") for path in extra]
    return altered(manifest, files) + odd


def altered(manifest: Manifest, files: Mapping[str, bytes]) -> list[SpecProblem]:
    """Return which files are not as the manifest says, itself included."""
    own = seal_problem(manifest)
    found = [] if own is None else [SpecProblem(pointer=MANIFEST, detail=own)]
    for path, entry in manifest.files.items():
        if path not in files:
            found.append(SpecProblem(pointer=path, detail="is in the manifest and not in the bundle"))
        elif digest_bytes(files[path]) != entry.digest:
            detail = f"was altered: its digest is {digest_bytes(files[path])}, the manifest says {entry.digest}"
            found.append(SpecProblem(pointer=path, detail=detail))
    return found


def _plan_file(manifest: Manifest, files: Mapping[str, bytes]) -> PlanFile:
    if PLAN not in files:
        raise BundleError([SpecProblem(pointer=PLAN, detail="is missing")])
    try:
        file = read_plan_file(files[PLAN])
        spec_digest = file.spec.digest
    except (PlanFileError, SpecError) as error:
        raise BundleError([SpecProblem(pointer=PLAN, detail=str(error))]) from error
    if file.digest != manifest.plan_digest:
        detail = f"has digest {file.digest}; the bundle was made from {manifest.plan_digest}"
        raise BundleError([SpecProblem(pointer=PLAN, detail=detail)])
    if spec_digest != file.plan.spec_digest:
        detail = f"its spec has digest {spec_digest}; it was planned as {file.plan.spec_digest}"
        raise BundleError([SpecProblem(pointer=PLAN, detail=detail)])
    return file


def _attempt_problems(
    done: Mapping[str, Attempt], broken: Sequence[BrokenAttempt], file: PlanFile, nodes: Mapping[str, NodeRecord]
) -> list[SpecProblem]:
    named = [*done.items(), *((f"attempts/{record.attempt_id}.json", record) for record in broken)]
    found, seen = [], set()
    for path, record in named:
        if record.index >= len(file.plan.blocks):
            detail = f"{block_name(record.index)} is not in the plan, which has {len(file.plan.blocks)}"
            found.append(SpecProblem(pointer=path, detail=detail))
        if record.node_id not in nodes:
            found.append(SpecProblem(pointer=path, detail=f"node {record.node_id} is not described in nodes/"))
        if record.attempt_id in seen:
            found.append(SpecProblem(pointer=path, detail=f"attempt {record.attempt_id} is there twice"))
        if record.ended_at < record.started_at:
            found.append(SpecProblem(pointer=path, detail="ended before it started"))
        seen.add(record.attempt_id)
    for path, record in done.items():
        if path != f"{block_folder(record.index)}/{BLOCK}":
            detail = f"is {block_name(record.index)}, which belongs into {block_folder(record.index)}"
            found.append(SpecProblem(pointer=path, detail=detail))
    return found


class _BlockReader:
    """Reads finished blocks and collects what is wrong with them."""

    def __init__(self, plan_file: PlanFile, files: Mapping[str, bytes]) -> None:
        self._plan_file = plan_file
        self._files = files
        self.problems: list[SpecProblem] = []
        self.known: set[str] = set()
        """Files that were read as part of a block."""

    def block(self, path: str, attempt: Attempt) -> BundledBlock:
        """Read one block with all of its trials."""
        self.known.add(path)
        claimed = self._plan_file.claimed(attempt.index, attempt_id=attempt.attempt_id, attempt_no=attempt.attempt_no)
        trials = []
        for trial in claimed.trials:
            folder = trial_folder(attempt.index, trial.position, trial.arm)
            expected = claimed_fields(claimed, trial, node_id=attempt.node_id)
            receipt = self._receipt(f"{folder}/{RECEIPT}", expected)
            log = self._text(f"{folder}/{LOG}")
            if receipt is not None and log is not None:
                trials.append(BundledTrial(trial_id=trial.trial_id, receipt=receipt, log=log))
        return BundledBlock(attempt=attempt, trials=tuple(trials))

    def _receipt(self, path: str, expected: Mapping[str, Any]) -> Receipt | None:
        text = self._text(path)
        if text is None:
            return None
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            self._note(path, f"is not JSON: {error}")
            return None
        if not isinstance(values, dict):
            self._note(path, "is not a receipt: expected a mapping")
            return None
        found = [f"{field} {detail}" for field, detail in mismatches(values, expected)] + verify(values)
        for detail in found:
            self._note(path, detail)
        return None if found else Receipt.model_validate_json(text)

    def _text(self, path: str) -> str | None:
        self.known.add(path)
        if path not in self._files:
            self._note(path, "is missing: a block counts whole or not at all")
            return None
        try:
            return self._files[path].decode()
        except UnicodeDecodeError as error:
            self._note(path, f"is not UTF-8: byte {error.start} cannot be decoded")
            return None

    def _note(self, path: str, detail: str) -> None:
        self.problems.append(SpecProblem(pointer=path, detail=detail))


def _unexpected_files(files: Mapping[str, bytes], known: set[str]) -> list[SpecProblem]:
    """Find files that no part of a bundle explains."""
    fixed = {MANIFEST, PLAN, *known}
    odd = [path for path in sorted(files) if path not in fixed and not path.startswith(("nodes/", "attempts/"))]
    return [SpecProblem(pointer=path, detail="is no file of a bundle") for path in odd]
