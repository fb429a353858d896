"""The plan file: an ablation for a node without a service, sealed by one digest.

`ablate plan SPEC --out` writes plan.json, or plan.tar with its code. `ablate offline exec` runs it, and every
bundle contains it unchanged. It has the ids of ablation, blocks and trials, so receipts from any node name them.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from pydantic import Field, ValidationError

from ablate.experiments.block_numbers import block_name
from ablate.experiments.design.arms import arm_digest
from ablate.experiments.design.equal_work import resolve_with_steps
from ablate.experiments.design.kinds.kind import ArmConfig
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import Plan, block_difference, draw_seeds, questions, with_control, with_drawn
from ablate.experiments.design.problems import listed
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.digest import code_digest
from ablate.experiments.documents import Frozen, first_problem, seal, seal_problem
from ablate.experiments.errors import PlanFileError, SpecError
from ablate.experiments.ids import id_pattern, new_id
from ablate.experiments.outcomes import SeedOrigin
from ablate.experiments.records.bundle_files import PLAN
from ablate.experiments.records.circumstances import CarriedPlan, Registration
from ablate.experiments.records.code_archive import PIECE_BYTES, PackedCode
from ablate.experiments.records.code_tree import MOST_BYTES
from ablate.experiments.records.identity import (
    AttemptLease,
    BlockIds,
    ClaimedBlock,
    PlannedWork,
    claimed_block,
    new_block_ids,
)
from ablate.experiments.retries import Break
from ablate.model.config import MAX_SEED
from ablate.model.measurements import OmitNone

KIND: Literal["ablate plan"] = "ablate plan"
SCHEMA_VERSION = 3
MAX_PLAN_BYTES = 64 * 2**20


class PlanFile(Frozen):
    """A plan for an air-gapped node."""

    kind: Literal["ablate plan"] = KIND
    schema_version: int = SCHEMA_VERSION
    made_at: str
    """RFC 3339 UTC."""
    code_digest: str
    """Of the source files of `ablate.experiments.digest.CODE_PACKAGES` when the plan was made."""
    ablation_id: Annotated[str, Field(pattern=id_pattern("abl"))]
    content_type: str
    spec_text: str
    """The user's spec, comments included."""
    plan: Plan
    blocks: tuple[BlockIds, ...]
    code: OmitNone[dict[str, str]] = None
    """Digest of the tree in each archive that arms name, by the archive's; None where no arm names one."""
    registered: OmitNone[Registration] = None
    """None if no service registered the plan."""
    digest: str
    """Of everything above."""

    @cached_property
    def spec(self) -> AblationSpec:
        """The parsed spec. Raises SpecError when this code rejects it."""
        return parse_spec(self.spec_text.encode(), self.content_type)

    def tree_of(self, config: ArmConfig) -> str | None:
        """Return the digest of the code that a configuration runs; None where the plan does not know it."""
        return None if config.archive is None else (self.code or {}).get(config.archive)

    def claimed(self, index: int, *, attempt_id: str, attempt_no: int, broken: Sequence[Break] = ()) -> ClaimedBlock:
        """Return the claim of block `index` after `broken` attempts, as a service would."""
        timeout_s = self.spec.limits.trial
        work = PlannedWork(ablation_id=self.ablation_id, block_index=index, timeout_s=timeout_s, broken=broken)
        lease = AttemptLease(attempt_id=attempt_id, attempt_no=attempt_no)
        return claimed_block(self.plan, self.blocks[index], work, lease)


def make_plan_file(
    plan: Plan,
    *,
    spec_text: str,
    content_type: str,
    code: Mapping[str, str] | None = None,
    to_register: bool = False,
) -> PlanFile:
    """Return the plan file of `plan`, made from `spec_text`, with new ids. `code` has the tree of each archive.

    A service draws the seeds of a plan `to_register`; any other one gets them here.
    """
    unsealed = PlanFile(
        made_at=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        code_digest=code_digest(),
        ablation_id=new_id("abl"),
        content_type=content_type,
        spec_text=spec_text,
        plan=plan if to_register else draw_seeds(plan),
        blocks=new_block_ids(plan),
        code=dict(code) if code else None,
        digest="",
    )
    return seal(unsealed)


def registered_file(file: PlanFile, seeds: Sequence[int], registration: Registration) -> PlanFile:
    """Return the plan file as a service registered it, with the seeds that it drew; none if the spec lists them."""
    plan = with_drawn(file.plan, seeds) if seeds else file.plan
    return seal(file.model_copy(update={"plan": plan, "registered": registration}))


def carried_plan(file: PlanFile) -> CarriedPlan | None:
    """Return when a service registered the plan, as it says; None for a plan without a question, such as A/A blocks."""
    if not questions(file.spec, file.plan):
        return None
    return CarriedPlan(registered_at=file.registered and file.registered.registered_at, compared=False)


def plan_file_text(file: PlanFile) -> str:
    """Return the text of a plan file; equal plans give equal texts."""
    return json.dumps(file.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"


def read_plan_file(data: bytes, *, to_register: bool = False) -> PlanFile:
    """Return the plan file in `data`. Raises PlanFileError when it is not one, was altered, or contradicts itself.

    Only a plan that a service is about to register may lack its seeds.
    """
    if len(data) > MAX_PLAN_BYTES:
        raise PlanFileError(f"the plan file has {len(data)} bytes; allowed: {MAX_PLAN_BYTES}")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"the plan file is not JSON: {error}; write one with `ablate plan SPEC --out`") from error
    _check_kind(values)
    try:
        file = PlanFile.model_validate_json(data)  # its JSON has no halves of characters, which nobody can digest
    except ValidationError as error:
        raise PlanFileError(f"not a plan file: {first_problem(error)}") from error
    altered = seal_problem(file)
    if altered is not None:
        raise PlanFileError(f"the plan file {altered}")
    problem = next(_contradictions(file), None)
    if problem is not None:
        raise PlanFileError(f"the plan file contradicts itself: {problem}")
    if file.plan.seeds is SeedOrigin.TO_BE_DRAWN and not to_register:
        raise PlanFileError("the seeds of the plan file were not drawn; write it with `ablate plan SPEC --out`")
    return file


def _check_kind(values: Any) -> None:
    if not isinstance(values, dict) or values.get("kind") != KIND:
        raise PlanFileError("this is not a plan file; write one with `ablate plan SPEC --out plan.json`")
    version = values.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise PlanFileError(f"the plan file has schema version {version!r}; this program reads {SCHEMA_VERSION}")


def _contradictions(file: PlanFile) -> Iterator[str]:
    """Find contradictions that no version of the code could have planned."""
    plan = file.plan
    names = {arm.name for arm in plan.arms}
    if len(file.blocks) != len(plan.blocks):
        yield f"{len(plan.blocks)} blocks, but ids for {len(file.blocks)}"
    for index, (block, ids) in enumerate(zip(plan.blocks, file.blocks, strict=False)):
        if block.index != index:
            yield f"{block_name(index)} has index {block.index}; expected {index}"
        if not 0 <= block.seed <= MAX_SEED:
            yield f"{block_name(index)} has seed {block.seed}; allowed: 0 to {MAX_SEED}"
        if set(block.order) != names or len(block.order) != len(names) or len(ids.trial_ids) != len(names):
            yield f"{block_name(index)} does not have every arm once"
    named = {archive for arm in plan.arms for archive in arm.config.archives}
    if named != set(file.code or ()):
        yield f"its arms name the code {listed(sorted(named))}; it has {listed(sorted(file.code or ()))}"
    for arm in plan.arms:
        expected = arm_digest(arm.gates, arm.config)
        if arm.digest != expected:
            yield f"arm '{arm.name}' has digest {arm.digest}; its gates and configuration give {expected}"
    ids_of_all = [trial for ids in file.blocks for trial in ids.trial_ids] + [ids.block_id for ids in file.blocks]
    if len(set(ids_of_all)) != len(ids_of_all):
        yield "an id appears twice"


def differences(file: PlanFile) -> list[str]:
    """Describe how this code would plan the file's spec differently; empty when it would not."""
    plan = file.plan
    try:
        spec = file.spec
    except SpecError as error:
        return [f"this code rejects the spec: {error}"]
    changes = [] if spec.digest == plan.spec_digest else [f"the spec's digest is {spec.digest} here"]
    resolution = resolve_with_steps(spec)
    if resolution.problems:
        return [*changes, *(f"{problem.pointer}: {problem.detail}" for problem in resolution.problems)]
    arms = resolution.arms if plan.control is None else with_control(resolution.arms)
    ours = {arm.name: arm.digest for arm in arms}
    theirs = {arm.name: arm.digest for arm in plan.arms}
    if list(ours) != list(theirs):
        return [*changes, f"the arms are {', '.join(ours)} here, {', '.join(theirs)} in the plan"]
    changes += [f"arm '{name}' resolves to another configuration" for name in ours if ours[name] != theirs[name]]
    if (other := block_difference(spec, plan)) is not None:
        changes.append(other)
    return changes


SUFFIX = ".tar"
_README = """This tar file has the plan of an ablation (plan.json) and the code of its arms (code/*.tar.gz).
Run it on a node: ablate offline exec FILE --out bundle/
"""


def write_plan_archive(path: Path, file: PlanFile, archives: Sequence[PackedCode]) -> None:
    """Write a plan and its code into one tar file. Equal plans and archives give equal bytes."""
    part = path.with_name(path.name + ".part")
    text = {"README.txt": _README.encode(), PLAN: plan_file_text(file).encode()}
    try:
        with tarfile.open(part, "w") as tar:
            for name, content in text.items():
                tar.addfile(_member(name, len(content)), io.BytesIO(content))
            for packed in sorted(archives, key=lambda one: one.digest):
                packed.file.seek(0)
                tar.addfile(_member(_place(packed.digest), packed.size), packed.file)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size
    return member


def _place(digest: str) -> str:
    return f"code/{digest.removeprefix('sha256:')}.tar.gz"


class PlanWithCode:
    """A plan on disk, as a JSON file or as a tar file with its code."""

    def __init__(self, path: Path) -> None:
        """Read the plan and check the digests of its code. Raises PlanFileError and OSError."""
        self._path = path
        with path.open("rb") as file:
            self._is_tar = file.read(1)[:1] not in {b"{", b""}
        if self._is_tar:
            self.plan_file = read_plan_file(b"".join(self._pieces(PLAN, MAX_PLAN_BYTES)))
        else:
            self.plan_file = read_plan_file(path.read_bytes())
        for digest in sorted(self.plan_file.code or ()):
            self._check(digest)

    def _check(self, digest: str) -> None:
        whole = hashlib.sha256()
        for piece in self.code(digest):
            whole.update(piece)
        if f"sha256:{whole.hexdigest()}" != digest:
            raise PlanFileError(
                f"{_place(digest)} in {self._path} was altered: its digest is sha256:{whole.hexdigest()}"
            )

    def code(self, digest: str) -> Iterator[bytes]:
        """Yield the bytes of an archive of code. Raises PlanFileError."""
        if not self._is_tar:
            raise PlanFileError(
                f"the plan names code {digest}, which {self._path} lacks; carry the tar file that "
                "`ablate plan SPEC --out plan.tar` wrote"
            )
        yield from self._pieces(_place(digest), MOST_BYTES)

    def _pieces(self, name: str, most_bytes: int) -> Iterator[bytes]:
        try:
            with tarfile.open(self._path, "r:") as tar:
                member = tar.getmember(name)
                source = tar.extractfile(member) if member.isreg() and not member.issparse() else None
                if source is None or member.size > most_bytes:
                    raise PlanFileError(f"{name} in {self._path} is no plain file, or too large")
                yield from _read(source)
        except (KeyError, tarfile.TarError, EOFError, OverflowError, UnicodeError) as error:
            detail = "write one with `ablate plan SPEC --out plan.tar`"
            raise PlanFileError(f"{self._path} is no plan with {name}: {error}; {detail}") from error


def _read(source: IO[bytes]) -> Iterator[bytes]:
    while piece := source.read(PIECE_BYTES):
        yield piece
