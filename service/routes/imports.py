"""Route that takes bundles of ablations which ran where no service was."""

from collections.abc import Iterator, Sequence

from fastapi import APIRouter, Depends
from sqlalchemy.exc import IntegrityError

from experiments.design.problems import pointer
from experiments.design.rule import rule_digest
from experiments.errors import BundleError, SpecProblem
from experiments.outcomes import AblationState
from experiments.records.bundle import Bundle, join_bundles
from experiments.records.bundle_paths import PLAN
from experiments.records.bundle_reader import open_bundle
from experiments.records.plan_file import differences
from service.errors import ImportedOtherwise, Invalid
from service.http.block_wire import verified
from service.http.call_limits import ImportRoute
from service.http.deps import Operator, Services, ServicesDep, json_only
from service.http.responses import secured
from service.http.serializers import links_of
from service.http.signatures import check_bundle
from service.schemas.imports import BundleFiles, ImportPublic, ImportRequest
from service.store.ablations.ablations import get_ablation
from service.store.ablations.imports import Import, known_bundles, store_import
from service.store.ablations.submissions import Submission

router = APIRouter(prefix="/v1", tags=["submissions"], dependencies=[Depends(json_only)], route_class=ImportRoute)


@router.post(
    "/ablations:import",
    operation_id="importBundles",
    summary="Take in an ablation that ran without a service",
    response_model=ImportPublic,
    responses=secured(409, 413, 415, 422),
)
def import_bundles(wanted: ImportRequest, services: ServicesDep, principal: Operator) -> ImportPublic:
    """Verify every file of the bundles and store the ablation, all of it or nothing. Again changes nothing."""
    bundle = _verified(wanted.bundles)
    check_bundle(services.store, bundle, trusted=wanted.trust, unsigned=wanted.unsigned)
    changed = _store(services, _import_of(bundle, principal.name, wanted.trust))
    if changed:
        services.wakes.notify()
    with services.store.read() as connection:
        row = get_ablation(connection, bundle.plan_file.ablation_id)
    return ImportPublic(
        id=row.id,
        name=row.name,
        state=AblationState(row.state),
        changed=changed,
        blocks_imported=len(bundle.blocks),
        block_indices_missing=list(bundle.missing),
        remarks=list(_remarks(bundle)),
        links=links_of(row.id),
    )


def _verified(given: Sequence[BundleFiles]) -> Bundle:
    problems: list[SpecProblem] = []
    bundles = []
    for number, one in enumerate(given):
        try:
            bundles.append(open_bundle({path: text.encode() for path, text in one.files.items()}))
        except BundleError as error:
            problems += [_pointed(found, number) for found in error.problems]
    if problems:
        raise Invalid("a bundle is damaged or was altered; nothing was imported", problems=problems)
    try:
        bundle = join_bundles(bundles)
    except BundleError as error:
        raise Invalid("the bundles do not belong together; nothing was imported", problems=error.problems) from error
    ours, planned = rule_digest(bundle.plan_file.spec), bundle.plan_file.plan.rule_digest
    if ours != planned:
        detail = f"the rule was hashed as {planned} before the first sample; this service would judge by {ours}"
        raise Invalid(problems=[_pointed(SpecProblem(pointer=PLAN, detail=detail), 0)])
    return bundle


def _pointed(found: SpecProblem, number: int) -> SpecProblem:
    """Return a problem of a file as a problem of the request."""
    where = pointer("bundles", number, "files", found.pointer)
    return SpecProblem(pointer=where, detail=f"{found.pointer} {found.detail}")


def _import_of(bundle: Bundle, imported_by: str, trusted: Sequence[str]) -> Import:
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
        receipts={
            block.attempt.index: [verified(trial.receipt.model_dump(mode="json")) for trial in block.trials]
            for block in bundle.blocks
        },
    )


def _store(services: Services, imported: Import) -> bool:
    """Store the import once; return whether this call did. Raises ImportedOtherwise."""
    try:
        with services.store.write() as connection:
            if _is_known(known_bundles(connection, imported.submission.ablation_id), imported):
                return False
            store_import(connection, imported)
    except IntegrityError:  # somebody imported it meanwhile, or an id of the bundle belongs to something else
        with services.store.read() as connection:
            known = known_bundles(connection, imported.submission.ablation_id)
        if _is_known(known, imported):
            return False
        raise ImportedOtherwise("an id in these bundles belongs to something else here; nothing was imported") from None
    return True


def _is_known(known: tuple[bool, str | None], imported: Import) -> bool:
    is_here, bundles = known
    if is_here and bundles != imported.bundles:
        origin = "was submitted here" if bundles is None else f"was imported from {bundles}"
        raise ImportedOtherwise(
            f"ablation {imported.submission.ablation_id} {origin}; what was judged is not changed. "
            "To judge several bundles of one plan together, import them together"
        )
    return is_here


def _remarks(bundle: Bundle) -> Iterator[str]:
    found = differences(bundle.plan_file)
    if found:
        yield f"this version would plan the spec otherwise ({'; '.join(found)}); the plan of the bundle counts"
    codes = {trial.receipt.digests.code for block in bundle.blocks for trial in block.trials}
    for code in sorted(codes - {bundle.plan_file.code_digest}):
        yield f"the trials ran code {code[:19]}; the plan was made beside {bundle.plan_file.code_digest[:19]}"
