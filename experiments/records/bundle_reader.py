"""Read and verify a bundle: files against manifest, plan, receipts, signatures and each other.

Bundles of release 0.1 verify by their digests and signatures (`earlier_release`), and nothing here judges them.

A node could sign anything, and write all its records alike. The reader finds statements that only some of them make.
The signature of the manifest covers every file by its digest.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from ablate.experiments.block_numbers import block_name
from ablate.experiments.design.kinds.program import ProgramArm
from ablate.experiments.digest import digest_bytes
from ablate.experiments.documents import Frozen, first_problem, seal_problem
from ablate.experiments.errors import BundleError, PlanFileError, SpecError, SpecProblem
from ablate.experiments.records.bundle import (
    SCHEMA_VERSION,
    Attempt,
    BrokenAttempt,
    Bundle,
    BundledBlock,
    BundledTrial,
    Manifest,
    NodeRecord,
    block_folder,
    trial_folder,
)
from ablate.experiments.records.bundle_files import BLOCK, LOG, MANIFEST, PLAN, RECEIPT
from ablate.experiments.records.earlier_release import LAST_BUNDLE, RELEASE, EarlierBundle, earlier_problems, is_earlier
from ablate.experiments.records.identity import claimed_fields, mismatches
from ablate.experiments.records.plan_file import PlanFile, read_plan_file
from ablate.experiments.records.receipt_check import checked
from ablate.experiments.records.receipt_clocks import slice_problems
from ablate.experiments.records.receipts import Receipt, held_by
from ablate.experiments.records.signing import manifest_statement, signature_problem

_Model = TypeVar("_Model", bound=Frozen)


def open_bundle(files: Mapping[str, bytes]) -> Bundle:
    """Verify the bundle of `files` (by path). Raises BundleError, which lists all bad files."""
    manifest = read_manifest(files)
    _refuse(_manifest_problems(manifest, files))
    plan_file = _plan_file(manifest, files)
    nodes = read_nodes(files)
    broken = dict(_read_all(BrokenAttempt, files, lambda path: path.startswith("attempts/")))
    finished = dict(_read_all(Attempt, files, lambda path: path.startswith("blocks/") and path.endswith(f"/{BLOCK}")))
    _refuse(_attempt_problems({**finished, **broken}, plan_file, nodes))
    reader = _BlockReader(plan_file, files)
    blocks = {path: reader.block(path, record) for path, record in finished.items()}
    _refuse([*reader.problems, *_unexpected_files(files, reader.paths)])
    signed, consistent = signature_problems(manifest, nodes.values()), _consistency_problems(blocks, broken, nodes)
    _refuse([*signed, *consistent])
    signature = manifest.signature
    return Bundle(
        digests=(manifest.digest,),
        plan_file=plan_file,
        nodes=nodes,
        blocks=tuple(sorted(blocks.values(), key=lambda block: block.attempt.index)),
        broken=tuple(sorted(broken.values(), key=lambda record: (record.index, record.attempt_no))),
        signed_as={} if signature is None else dict.fromkeys(nodes, signature.key),
        is_signed=signature is not None,
    )


def verify_bundle(files: Mapping[str, bytes]) -> Bundle | EarlierBundle:
    """Verify a bundle of any release. Raises BundleError, which lists all bad files."""
    manifest = read_manifest(files)
    if not is_earlier(manifest.schema_version, LAST_BUNDLE):
        return open_bundle(files)
    _refuse([*_file_problems(manifest, files), *earlier_problems(manifest, files)])
    return EarlierBundle(key=None if manifest.signature is None else manifest.signature.key)


def read_manifest(files: Mapping[str, bytes]) -> Manifest:
    """Return the manifest without checks. Raises BundleError without a manifest."""
    return _read(Manifest, files, MANIFEST)


def read_nodes(files: Mapping[str, bytes]) -> dict[str, NodeRecord]:
    """Return the nodes that a bundle describes, by id. Raises BundleError."""
    records = _read_all(NodeRecord, files, lambda path: path.startswith("nodes/"))
    return {node.node_id: node for _, node in records}


def altered_files(manifest: Manifest, files: Mapping[str, bytes]) -> list[SpecProblem]:
    """Find files that differ from the manifest, itself included."""
    own = seal_problem(manifest)
    problems = [] if own is None else [SpecProblem(pointer=MANIFEST, detail=own)]
    for path, entry in manifest.files.items():
        if path not in files:
            problems.append(SpecProblem(pointer=path, detail="is in the manifest but not in the bundle"))
        elif digest_bytes(files[path]) != entry.digest:
            detail = f"was altered: its digest is {digest_bytes(files[path])}, the manifest says {entry.digest}"
            problems.append(SpecProblem(pointer=path, detail=detail))
    return problems


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
    model: type[_Model], files: Mapping[str, bytes], belongs: Callable[[str], bool]
) -> Iterator[tuple[str, _Model]]:
    for path in sorted(files):
        if belongs(path):
            yield path, _read(model, files, path)


def _manifest_problems(manifest: Manifest, files: Mapping[str, bytes]) -> list[SpecProblem]:
    if manifest.schema_version != SCHEMA_VERSION:
        detail = f"schema_version is {manifest.schema_version}; this program judges {SCHEMA_VERSION}"
        earlier = is_earlier(manifest.schema_version, LAST_BUNDLE)
        hint = f"release {RELEASE} judged it; `ablate offline verify` checks digests and signatures"
        return [SpecProblem(pointer=MANIFEST, detail=detail, hint=hint if earlier else None)]
    return _file_problems(manifest, files)


def _file_problems(manifest: Manifest, files: Mapping[str, bytes]) -> list[SpecProblem]:
    """Compare the files with the manifest."""
    extra = sorted(set(files) - set(manifest.files) - {MANIFEST})
    unlisted = [SpecProblem(pointer=path, detail="is in the bundle but not in the manifest") for path in extra]
    return altered_files(manifest, files) + unlisted


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
        detail = f"its spec has digest {spec_digest}; the plan was made from {file.plan.spec_digest}"
        raise BundleError([SpecProblem(pointer=PLAN, detail=detail)])
    return file


def _attempt_problems(
    records: Mapping[str, Attempt], file: PlanFile, nodes: Mapping[str, NodeRecord]
) -> list[SpecProblem]:
    problems: list[SpecProblem] = []
    seen: set[str] = set()
    for path, record in records.items():
        problems += [SpecProblem(pointer=path, detail=detail) for detail in _misfits(path, record, file, nodes)]
        if record.attempt_id in seen:
            problems.append(SpecProblem(pointer=path, detail=f"attempt {record.attempt_id} appears twice"))
        seen.add(record.attempt_id)
    return problems


def _misfits(path: str, record: Attempt, file: PlanFile, nodes: Mapping[str, NodeRecord]) -> Iterator[str]:
    if record.index >= len(file.plan.blocks):
        yield f"{block_name(record.index)} is not in the plan, which has {len(file.plan.blocks)}"
    if record.node_id not in nodes:
        yield f"node {record.node_id} is not described in nodes/"
    if record.ended_at < record.started_at:
        yield "ended before it started"
    if isinstance(record, BrokenAttempt):
        if record.arm is not None and record.arm not in file.plan.arm_by_name:
            yield f"arm {record.arm!r} is not in the plan"
    elif path != f"{block_folder(record.index)}/{BLOCK}":
        yield f"is {block_name(record.index)}, which belongs in {block_folder(record.index)}"


class _BlockReader:
    """Reads finished blocks and collects their problems."""

    def __init__(self, plan_file: PlanFile, files: Mapping[str, bytes]) -> None:
        self._plan_file = plan_file
        self._files = files
        self.problems: list[SpecProblem] = []
        self.paths: set[str] = set()
        """Files that belong to a block."""

    def block(self, path: str, attempt: Attempt) -> BundledBlock:
        """Read one block with all its trials."""
        self.paths.add(path)
        claimed = self._plan_file.claimed(attempt.index, attempt_id=attempt.attempt_id, attempt_no=attempt.attempt_no)
        trials = []
        for trial in claimed.trials:
            folder = trial_folder(attempt.index, trial.position, trial.arm)
            expected = claimed_fields(claimed, trial, node_id=attempt.node_id)
            receipt = self._receipt(f"{folder}/{RECEIPT}", expected)
            log = self._text(f"{folder}/{LOG}")
            if receipt is not None:
                self._check_code(f"{folder}/{RECEIPT}", receipt)
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
        receipt, problems = checked(values)
        details = [f"{field} {detail}" for field, detail in mismatches(values, expected)] + problems
        for detail in details:
            self._note(path, detail)
        return None if details else receipt

    def _check_code(self, path: str, receipt: Receipt) -> None:
        """Compare the code that a trial ran with the code that the plan carried."""
        config = self._plan_file.plan.arm_by_name[receipt.arm].config
        report = receipt.program
        if report is None or not isinstance(config, ProgramArm):
            return
        planned = self._plan_file.tree_of(config)
        if planned not in (None, report.code):
            self._note(path, f"ran code {report.code}; the plan has {planned} for arm '{receipt.arm}'")
        if config.judge is not None and report.evaluation is not None:
            planned = self._plan_file.tree_of(config.judge)
            if planned not in (None, report.evaluation.code):
                self._note(path, f"evaluated with code {report.evaluation.code}; the plan has {planned}")

    def _text(self, path: str) -> str | None:
        self.paths.add(path)
        if path not in self._files:
            self._note(path, "is missing: only whole blocks count")
            return None
        try:
            return self._files[path].decode()
        except UnicodeDecodeError as error:
            self._note(path, f"is not UTF-8: byte {error.start} cannot be decoded")
            return None

    def _note(self, path: str, detail: str) -> None:
        self.problems.append(SpecProblem(pointer=path, detail=detail))


def _unexpected_files(files: Mapping[str, bytes], paths: set[str]) -> list[SpecProblem]:
    """Find files that do not belong to a bundle."""
    expected = {MANIFEST, PLAN, *paths}
    extra = [path for path in sorted(files) if path not in expected and not path.startswith(("nodes/", "attempts/"))]
    return [SpecProblem(pointer=path, detail="does not belong to a bundle") for path in extra]


def _consistency_problems(
    blocks: Mapping[str, BundledBlock], broken: Mapping[str, BrokenAttempt], nodes: Mapping[str, NodeRecord]
) -> list[SpecProblem]:
    """Find contradictions of receipts to their node, and of attempts to each other."""
    problems = list(_number_problems([block.attempt for block in blocks.values()], [*broken.values()]))
    for path, block in blocks.items():
        details = [
            *_node_problems(block, nodes[block.attempt.node_id]),
            *slice_problems([trial.receipt for trial in block.trials]),
        ]
        problems += [SpecProblem(pointer=path, detail=detail) for detail in details]
    return problems


def _node_problems(block: BundledBlock, node: NodeRecord) -> Iterator[str]:
    """Compare the machine in the receipts with the node."""
    registered = node.registration
    devices = {(device.name, device.serial) for device in registered.devices}
    expected = {
        "digests": {"code": registered.code_digest},
        "environment": {"node_class": registered.node_class, "versions": dict(registered.versions)},
    }
    for trial in block.trials:
        receipt = trial.receipt
        values = receipt.model_dump(mode="json", include={"digests", "environment"})
        for where, detail in mismatches(values, expected):
            yield f"arm '{receipt.arm}': {where} {detail}, as node {node.node_id} registered"
        for device in held_by(receipt.environment):
            if device not in devices:
                yield f"arm '{receipt.arm}' ran on {device}; node {node.node_id} has {sorted(devices, key=str)}"


def _number_problems(finished: Sequence[Attempt], broken: Sequence[BrokenAttempt]) -> Iterator[SpecProblem]:
    """Find missing attempts: the attempts of a block count from 1, and the last one finished it."""
    for index in sorted({attempt.index for attempt in [*finished, *broken]}):
        numbers = sorted(record.attempt_no for record in broken if record.index == index)
        numbers += [attempt.attempt_no for attempt in finished if attempt.index == index]
        if numbers != list(range(1, len(numbers) + 1)):
            detail = f"{block_name(index)} has attempts {numbers}; expected 1, 2, ... with the finished one last"
            yield SpecProblem(pointer=f"{block_folder(index)}/{BLOCK}", detail=detail)


def signature_problems(manifest: Manifest, nodes: Iterable[NodeRecord]) -> Iterator[SpecProblem]:
    """Find a signature that does not fit, or is not by the one node of the bundle."""
    signature, keys = manifest.signature, {node.registration.public_key for node in nodes}
    if len(keys) > 1:
        named = ", ".join(sorted(str(key or "no key") for key in keys))
        detail = f"describes nodes with {named}; a bundle is of one node, and those of several are imported together"
        yield SpecProblem(pointer=MANIFEST, detail=detail)
    elif signature is not None and signature.key not in keys:
        detail = f"is signed by {signature.key}, which is the key of no node in this bundle"
        yield SpecProblem(pointer=MANIFEST, detail=detail)
    elif signature is not None:
        problem = signature_problem(signature, manifest_statement(manifest.digest))
        if problem is not None:
            yield SpecProblem(pointer=MANIFEST, detail=f"its signature {problem}")
