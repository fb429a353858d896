"""Routes that find, read, cancel and reprioritize ablations."""

from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, Field
from sqlalchemy import Connection, Row

from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.design.spec_values import NAME_PATTERN
from ablate.experiments.ids import CALLED_PATTERN, LABEL_FILTER, TOKEN_NAME, id_pattern
from ablate.experiments.outcomes import AblationState
from ablate.service.errors import NotYet
from ablate.service.http.deps import AblationId, Reader, Services, ServicesDep, Submitter, json_only
from ablate.service.http.event_streams import streams_of
from ablate.service.http.pagination import FROM_NEXT, PLACE, Listing, PageQuery, page, text_like
from ablate.service.http.responses import document, event_content, html_page, secured
from ablate.service.http.serializers import ablation_public, block_public, silent_limit_s, trial_public
from ablate.service.lifecycle import OVER
from ablate.service.queue.waiting import waiting
from ablate.service.schemas.ablations import AblationPublic, BlockPublic, Event, PriorityChange, TrialPublic
from ablate.service.schemas.public import Page
from ablate.service.schemas.submissions import SpecText
from ablate.service.settings import ServiceSettings
from ablate.service.store.ablations import ablations as store_ablations
from ablate.service.store.ablations import results
from ablate.service.store.ablations.names import find_ablation
from ablate.service.store.access import tokens
from ablate.service.store.blocks import turns
from ablate.service.store.files import code_archives

router = APIRouter(prefix="/v1/ablations", tags=["ablations"])

_SEQUENCE = "^(0|[1-9][0-9]{0,17})$"
"""Pattern of a sequence number that fits 64 bits."""
_DIGEST = "^sha256:[0-9a-f]{64}$"
_ABLATION, _BLOCK, _TRIAL = id_pattern("abl"), f"^{PLACE}$", f"^{PLACE}[.]{PLACE}$"
"""Patterns of cursors."""
CalledName = Annotated[
    str,
    Query(
        pattern=CALLED_PATTERN,
        description="A name, an id, a beginning that only one of them has, or `latest`. A name means its newest.",
        examples=["psiv-cache"],
    ),
]
_NOT_MODIFIED: dict[int | str, dict[str, Any]] = {304: {"description": "The client has this already (If-None-Match)."}}


def _page_of(item: type[BaseModel], *statuses: int) -> dict[str, Any]:
    """Declare a page of items, and problem documents for `statuses`, in OpenAPI."""
    return {"response_model": Page[item], "responses": {**secured(*statuses), **_NOT_MODIFIED}}  # type: ignore[valid-type]


class AblationQuery(PageQuery):
    """Filters of the list of ablations."""

    limit: int = Field(default=50, ge=1, le=500, description="Most items on the page.")
    cursor: Annotated[str | None, text_like(_ABLATION)] = Field(default=None, pattern=_ABLATION, description=FROM_NEXT)
    state: list[AblationState] = Field(default=[], max_length=6, description="Only these states.")
    label: Annotated[str | None, text_like(LABEL_FILTER)] = Field(
        default=None, pattern=LABEL_FILTER, description="`key` or `key=value`."
    )
    digest: Annotated[str | None, text_like(_DIGEST)] = Field(
        default=None, pattern=_DIGEST, description="Digest of the spec or of its rule."
    )
    name: Annotated[str | None, text_like(NAME_PATTERN)] = Field(
        default=None, pattern=NAME_PATTERN, description="Only ablations of this name."
    )
    owner: Annotated[str | None, text_like(TOKEN_NAME)] = Field(
        default=None, pattern=TOKEN_NAME, description="Only ablations that a token of this name submitted or imported."
    )


class BlockQuery(PageQuery):
    """The page of an ablation's blocks."""

    cursor: Annotated[str | None, text_like(_BLOCK)] = Field(default=None, pattern=_BLOCK, description=FROM_NEXT)


class TrialQuery(PageQuery):
    """The page of an ablation's trials."""

    cursor: Annotated[str | None, text_like(_TRIAL)] = Field(default=None, pattern=_TRIAL, description=FROM_NEXT)


@router.get("", operation_id="listAblations", summary="List ablations, newest first", **_page_of(AblationPublic, 422))
def list_ablations(
    request: Request, services: ServicesDep, principal: Reader, wanted: Annotated[AblationQuery, Query()]
) -> Response:
    """Return a page of ablations."""
    key, has_value, value = (wanted.label or "").partition("=")
    filters = store_ablations.Wanted(
        states=wanted.state,
        label=(key, value if has_value else None) if key else None,
        digest=wanted.digest,
        name=wanted.name,
        owner=wanted.owner,
    )
    listing = Listing(
        start=("",),
        key=lambda row: (row.id,),
        read=lambda connection, before, limit: store_ablations.list_ablations(
            connection, filters, before=before[0] or None, limit=limit
        ),
        items=lambda connection, rows: public(connection, rows, services.settings),
    )
    return page(request, services.store, wanted, listing)


def public(connection: Connection, rows: Sequence[Row[Any]], settings: ServiceSettings) -> list[AblationPublic]:
    """Return ablations in their current state."""
    labels = store_ablations.labels_of(connection, [row.id for row in rows])
    waits = waiting(connection, rows, silent_s=silent_limit_s(settings))
    url = settings.mlflow_link_url
    return [ablation_public(r, labels[r.id], waiting=waits.get(r.id), mlflow=url) for r in rows]


@router.get(
    "/{ablation_id:word}",
    operation_id="getAblation",
    summary="Show an ablation",
    response_model=AblationPublic,
    responses={**secured(404, 422), **_NOT_MODIFIED},
)
def get_ablation(request: Request, ablation_id: AblationId, services: ServicesDep, principal: Reader) -> Response:
    """Return the ablation in its current state."""
    return document(request, load(services, ablation_id))


def load(services: Services, ablation_id: str) -> AblationPublic:
    """Return the ablation in its current state. Raises NotFound."""
    with services.store.read() as connection:
        return public(connection, [store_ablations.get_ablation(connection, ablation_id)], services.settings)[0]


def _blocks_of(ablation_id: str) -> Listing[tuple[int], BlockPublic]:
    return Listing(
        start=(-1,),
        key=lambda row: (row._mapping["index"],),
        read=partial(store_ablations.list_blocks, ablation_id=ablation_id),
        items=lambda _, rows: [block_public(row) for row in rows],
    )


@router.get(
    "/{ablation_id}/blocks",
    operation_id="listBlocks",
    summary="List the blocks of an ablation",
    **_page_of(BlockPublic, 404, 422),
)
def list_blocks(
    request: Request,
    ablation_id: AblationId,
    services: ServicesDep,
    principal: Reader,
    wanted: Annotated[BlockQuery, Query()],
) -> Response:
    """Return a page of blocks, by index."""
    return page(request, services.store, wanted, _blocks_of(ablation_id))


def _trials_of(ablation_id: str) -> Listing[tuple[int, int], TrialPublic]:
    return Listing(
        start=(-1, -1),
        key=lambda row: (row.block_index, row.position),
        read=partial(store_ablations.list_trials, ablation_id=ablation_id),
        items=lambda _, rows: [trial_public(row) for row in rows],
    )


@router.get(
    "/{ablation_id}/trials",
    operation_id="listTrials",
    summary="List the trials of an ablation",
    **_page_of(TrialPublic, 404, 422),
)
def list_trials(
    request: Request,
    ablation_id: AblationId,
    services: ServicesDep,
    principal: Reader,
    wanted: Annotated[TrialQuery, Query()],
) -> Response:
    """Return a page of trials, in running order."""
    return page(request, services.store, wanted, _trials_of(ablation_id))


@router.get(
    "/{ablation_id}/spec",
    operation_id="getSpec",
    summary="Show the submitted spec",
    responses=secured(404, 422),
)
def get_spec(ablation_id: AblationId, services: ServicesDep, principal: Reader) -> SpecText:
    """Return the submitted text with its content type. Archives that this token may not use are `hidden` in it."""
    with services.store.read() as connection:
        store_ablations.check_exists(connection, ablation_id)
        body = results.read_spec(connection, ablation_id)
        text = code_archives.shown_spec(connection, body.content.decode(), principal)
    return SpecText(text=text, content_type=body.content_type)


@router.get(
    ":find",
    operation_id="findAblation",
    summary="Find an ablation by its name or id",
    response_model=AblationPublic,
    responses={**secured(404, 409, 422), **_NOT_MODIFIED},
)
def find(request: Request, name: CalledName, services: ServicesDep, principal: Reader) -> Response:
    """Return the ablation with this name or id."""
    with services.store.read() as connection:
        ablation_id = find_ablation(connection, name)
    return document(request, load(services, ablation_id))


@router.patch(
    "/{ablation_id:word}",
    operation_id="setPriority",
    summary="Change the priority of an ablation",
    dependencies=[Depends(json_only)],
    responses=secured(404, 409, 413, 415, 422),
)
def set_priority(
    ablation_id: AblationId, change: PriorityChange, services: ServicesDep, principal: Submitter
) -> AblationPublic:
    """Change the priority of waiting blocks. Running blocks go on, and keep the new priority if they break."""
    with services.store.write() as connection:
        tokens.check_owner(connection, principal, ablation_id)
        turns.set_priority(connection, ablation_id, change.priority, actor=principal.name)
    return load(services, ablation_id)


@router.post(
    "/{ablation_id}:cancel",
    operation_id="cancelAblation",
    summary="Cancel an ablation",
    status_code=HTTPStatus.ACCEPTED,
    response_model=AblationPublic,
    responses=secured(404, 409, 422),
)
def cancel_ablation(ablation_id: AblationId, services: ServicesDep, principal: Submitter) -> AblationPublic:
    """Cancel queued blocks at once and running ones through their workers; repeating it changes nothing.

    Operators cancel any ablation, others only their own.
    """
    with services.store.write() as connection:
        tokens.check_owner(connection, principal, ablation_id)
        store_ablations.cancel(connection, ablation_id, actor=principal.name)
    return load(services, ablation_id)


@router.get(
    "/{ablation_id}/verdict",
    operation_id="getVerdict",
    summary="Show the verdict",
    response_model=Verdict,
    responses=secured(404, 409, 422),
)
def get_verdict(ablation_id: AblationId, services: ServicesDep, principal: Reader) -> Response:
    """Return the verdict with its numbers and its rule."""
    return Response(_document(services, ablation_id, "verdict"), media_type="application/json")


@router.get(
    "/{ablation_id}/report",
    operation_id="getReport",
    summary="Show the report",
    response_class=HTMLResponse,
    responses=secured(404, 409, 422),
)
def get_report(ablation_id: AblationId, services: ServicesDep, principal: Reader) -> HTMLResponse:
    """Return the report as one self-contained page."""
    return html_page(_document(services, ablation_id, "report_html"))


def _document(services: Services, ablation_id: str, column: str) -> str:
    with services.store.read() as connection:
        row = store_ablations.get_document(connection, ablation_id, column)
    if row.document is None:
        raise NotYet(_why_not(column.partition("_")[0], row.state))
    return str(row.document)


def _why_not(name: str, state: AblationState) -> str:
    if state == AblationState.CANCELLED:
        return f"the ablation was cancelled and has no {name}"
    when = "is being written" if state in OVER else "is written when every block has ended"
    return f"the ablation is {state}; its {name} {when}"


@router.get(
    "/{ablation_id}/events",
    operation_id="streamEvents",
    summary="Follow an ablation as server-sent events",
    response_class=Response,
    responses={
        200: {"description": "Events; `id` is the sequence number.", "content": event_content(Event)},
        **secured(404, 422),
    },
)
async def stream_events(
    request: Request,
    ablation_id: AblationId,
    principal: Reader,
    last_event_id: Annotated[str, Header(pattern=_SEQUENCE, description="Replay the events after this one.")] = "0",
) -> Response:
    """Replay events after Last-Event-ID, follow new ones, and close with an `end` event once nothing more can come.

    The last event is `verdict`, which the background process writes a moment after the last block has ended, or the
    cancellation, which has no verdict. Without a background process, the stream of a finished ablation stays open.
    """
    return await streams_of(request).of_ablation(principal, ablation_id, int(last_event_id))
