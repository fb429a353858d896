"""The route that imports bundles: ablations that ran without a service."""

import io
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from ablate.experiments.analysis.proposals import refuse_session_key
from ablate.experiments.design.rule import rule_digest
from ablate.experiments.errors import BundleError, SpecError, SpecProblem
from ablate.experiments.outcomes import AblationState
from ablate.experiments.records.bundle import Bundle, join_bundles
from ablate.experiments.records.bundle_files import MANIFEST, PLAN, read_tar_stream
from ablate.experiments.records.bundle_reader import open_bundle
from ablate.experiments.records.plan_file import PlanFile, differences
from ablate.experiments.records.signing import PublicKey
from ablate.service.errors import ImportedOtherwise, Invalid
from ablate.service.http.deps import LongRoute, Operator, Services, ServicesDep, body_of_type
from ablate.service.http.responses import secured
from ablate.service.http.serializers import links_of
from ablate.service.schemas.submissions import ImportPublic
from ablate.service.store.ablations.ablations import get_ablation
from ablate.service.store.ablations.imports import Import, known_bundles, store_import
from ablate.service.store.ablations.submissions import Submission
from ablate.service.store.access import keys
from ablate.service.store.blocks.block_wire import verified
from ablate.service.store.questions import plans
from ablate.service.store.session import Store

router = APIRouter(prefix="/v1", tags=["submissions"], route_class=LongRoute)

MEDIA_TYPE = "application/x-tar"
MAX_BUNDLES = 100
"""Bundles in one archive."""
_ARCHIVE = "archive"
_SHOWN = 5
"""Most names in a list of names."""
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "A tar archive, compressed with gzip or not. Each folder with a manifest.json is a bundle.",
        "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    }
}


class ImportQuery(BaseModel):
    """Options of an import."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trust: list[PublicKey] = Field(default=[], max_length=100, description="Keys to trust from now on.")
    unsigned: bool = Field(default=False, description="Accept bundles without a signature. The verdict says so.")


async def _archive(request: Request) -> bytes:
    return await body_of_type(request, MEDIA_TYPE)


@router.post(
    "/ablations:import",
    operation_id="importBundles",
    summary="Import an ablation that ran without a service",
    response_model=ImportPublic,
    responses=secured(409, 413, 415, 422),
    openapi_extra=_BODY,
)
def import_bundles(
    archive: Annotated[bytes, Depends(_archive)],
    options: Annotated[ImportQuery, Query()],
    services: ServicesDep,
    principal: Operator,
) -> ImportPublic:
    """Verify every file of the bundles of one plan, then store the whole ablation or nothing.

    Importing the same bundles again changes nothing.
    """
    bundle = _verified(archive)
    _check_signatures(services.store, bundle, trusted=options.trust, unsigned=options.unsigned)
    changed = _store(services, _import_of(bundle, principal.name, options.trust))
    if changed:
        services.wakes.notify()
    with services.store.read() as connection:
        row = get_ablation(connection, bundle.plan_file.ablation_id)
        is_registered = plans.find(connection, bundle.plan_file.ablation_id) is not None
    return ImportPublic(
        id=row.id,
        name=row.name,
        state=AblationState(row.state),
        changed=changed,
        blocks_imported=len(bundle.blocks),
        block_indices_missing=list(bundle.missing),
        remarks=list(_remarks(bundle, is_registered=is_registered)),
        links=links_of(row.id),
    )


def _verified(archive: bytes) -> Bundle:
    """Return the joined bundles of an archive. Raises Invalid."""
    problems: list[SpecProblem] = []
    bundles = []
    for folder, files in _bundles_in(archive).items():
        try:
            bundles.append(open_bundle(files))
        except BundleError as error:
            problems += [_in_archive(problem, folder) for problem in error.problems]
    if problems:
        raise Invalid("a bundle is not acceptable; nothing was imported", problems=problems)
    try:
        bundle = join_bundles(bundles)
    except BundleError as error:
        raise Invalid("the bundles do not belong together; nothing was imported", problems=error.problems) from error
    try:
        refuse_session_key(bundle.plan_file.spec)
    except SpecError as error:
        problems = [_in_archive(replace(one, pointer=f"{PLAN}{one.pointer}")) for one in error.problems]
        raise Invalid(
            "a proposal belongs to the session of a service; nothing was imported", problems=problems
        ) from error
    spec, planned = bundle.plan_file.spec, bundle.plan_file.plan.rule_digest
    if planned != (ours := rule_digest(spec)):
        detail = f"the rule was hashed as {planned} before the first sample; this service would judge by {ours}"
        raise Invalid(problems=[_in_archive(SpecProblem(pointer=PLAN, detail=detail))])
    return bundle


def _bundles_in(archive: bytes) -> dict[str, dict[str, bytes]]:
    """Return the files of each bundle by path below its folder, by the folder's name. Raises Invalid."""
    try:
        files = read_tar_stream(io.BytesIO(archive), _ARCHIVE)
    except BundleError as error:
        problems = [_in_archive(problem) for problem in error.problems]
        raise Invalid("the archive cannot be read; nothing was imported", problems=problems) from error
    folders = [name.removesuffix(MANIFEST) for name in files if PurePosixPath(name).name == MANIFEST]
    if not 1 <= len(folders) <= MAX_BUNDLES:
        detail = f"holds {len(folders)} files named {MANIFEST}; one for each bundle is needed, at most {MAX_BUNDLES}"
        raise Invalid(problems=[SpecProblem(pointer=_ARCHIVE, detail=detail)])
    bundles: dict[str, dict[str, bytes]] = {folder: {} for folder in sorted(folders, key=len, reverse=True)}
    for name, content in files.items():
        folder = next((folder for folder in bundles if name.startswith(folder)), None)
        if folder is None:
            raise Invalid(problems=[_in_archive(SpecProblem(pointer=name, detail="belongs to no bundle"))])
        bundles[folder][name.removeprefix(folder)] = content
    return {folder: bundles[folder] for folder in folders}


def _in_archive(problem: SpecProblem, folder: str = "") -> SpecProblem:
    """Return a problem of a file as a problem of the request: `archive:` and the file's path in it."""
    path = "" if problem.pointer == _ARCHIVE else f"{folder}{problem.pointer}"
    pointer = f"{_ARCHIVE}:{path}" if path else _ARCHIVE
    return SpecProblem(pointer=pointer, detail=f"{path or 'the archive'} {problem.detail}", hint=problem.hint)


def _import_of(bundle: Bundle, imported_by: str, trusted: Iterable[str]) -> Import:
    file = bundle.plan_file
    return Import(
        bundle=bundle,
        trusted=tuple(trusted),
        submission=Submission(
            ablation_id=file.ablation_id,
            spec=file.spec,
            plan=file.plan,
            spec_text=file.spec_text,
            content_type=file.content_type,
            submitted_by=imported_by,
        ),
        receipts={block.attempt.index: [verified(trial.receipt) for trial in block.trials] for block in bundle.blocks},
    )


def _store(services: Services, imported: Import) -> bool:
    """Store the import once; return whether this call stored it. Raises ImportedOtherwise."""
    try:
        with services.store.write() as connection:
            _check_registration(connection, imported.bundle.plan_file)
            if _is_stored(known_bundles(connection, imported.submission.ablation_id), imported):
                return False
            store_import(connection, imported)
    except IntegrityError:  # another request imported it meanwhile, or an id of the bundle belongs to something else
        with services.store.read() as connection:
            row = known_bundles(connection, imported.submission.ablation_id)
        if _is_stored(row, imported):
            return False
        raise ImportedOtherwise("an id in these bundles belongs to something else here; nothing was imported") from None
    return True


def _is_stored(row: tuple[bool, str | None], imported: Import) -> bool:
    """Return whether it is stored. Raises ImportedOtherwise if it was submitted or came from other bundles."""
    is_here, bundles = row
    if is_here and bundles != imported.bundles:
        origin = "was submitted here" if bundles is None else f"was imported from {bundles}"
        raise ImportedOtherwise(
            f"ablation {imported.submission.ablation_id} {origin}; a judged ablation does not change. "
            "To judge several bundles of one plan together, import them together"
        )
    return is_here


def _check_registration(connection: Connection, file: PlanFile) -> None:
    """Raise ImportedOtherwise if another plan was registered under the id of this one."""
    registered = plans.find(connection, file.ablation_id)
    if registered is not None and registered.digest != file.digest:
        raise ImportedOtherwise(
            f"ablation {file.ablation_id} was registered with plan {registered.digest}; the bundles have {file.digest}"
        )


def _remarks(bundle: Bundle, *, is_registered: bool) -> Iterator[str]:
    registered = bundle.plan_file.registered
    if registered is not None and not is_registered:
        yield f"the plan says that a service registered it at {registered.registered_at}; this one did not"
    changes = differences(bundle.plan_file)
    if changes:
        yield f"this version would plan the spec differently ({'; '.join(changes)}); the plan of the bundle counts"
    codes = {trial.receipt.digests.code for block in bundle.blocks for trial in block.trials}
    for code in sorted(codes - {bundle.plan_file.code_digest}):
        yield f"the trials ran code {code[:19]}; the plan was made with {bundle.plan_file.code_digest[:19]}"


def _check_signatures(store: Store, bundle: Bundle, *, trusted: Collection[str], unsigned: bool) -> None:
    """Check that each joined bundle is signed, by a key that is trusted for the name of its node.

    Keys in `trusted` are, from now on. Raises Invalid.
    """
    signers = {(node.name, node.registration.public_key) for node in bundle.nodes.values()}
    with store.read() as connection:
        refused = [
            (node, key, why)
            for node, key in sorted(signers, key=str)
            if key in bundle.keys and key not in trusted and (why := keys.refusal(connection, node, key)) is not None
        ]
    problems = [*_untrusted(refused), *_unused(bundle, trusted)]
    if not (bundle.is_signed or unsigned):
        hint = "if you know their origin, import with --unsigned; the verdict will mention it"
        problems.append(_at("query:unsigned", "a bundle is not signed by its node", hint))
    if problems:
        raise Invalid("the origin of these bundles is not proved; nothing was imported", problems=problems)


def _untrusted(refused: Iterable[tuple[str, str, str]]) -> Iterator[SpecProblem]:
    for node, key, why in refused:
        hint = f"compare it with the key that `ablate offline exec` printed on the node, then import with --trust {key}"
        yield _at("query:trust", f"the bundles are signed by {key} as node '{node}'; this key {why}", hint)


def _unused(bundle: Bundle, trusted: Collection[str]) -> Iterator[SpecProblem]:
    for key in sorted(set(trusted) - bundle.keys):
        yield _at("query:trust", f"{key} signed nothing in these bundles; they are signed by {_listed(bundle.keys)}")


def _listed(names: Collection[str]) -> str:
    ordered = sorted(names)
    rest = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return (", ".join(ordered[:_SHOWN]) or "nobody") + rest


def _at(pointer: str, detail: str, hint: str | None = None) -> SpecProblem:
    return SpecProblem(pointer=pointer, detail=detail, hint=hint)
