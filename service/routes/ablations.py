"""Routes that read and cancel ablations."""

from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import HTMLResponse

from experiments.analysis.verdicts import Verdict
from service.deps import (
    AblationFilter,
    AblationId,
    Cursor,
    Limit,
    Reader,
    ServicesDep,
    Submitter,
    decode_cursor,
    encode_cursor,
)
from service.errors import NotYet
from service.responses import document, secured
from service.schemas import AblationPublic, BlockPublic, Page, TrialPublic
from service.serializers import ablation_public, block_public, trial_public, waiting_reasons
from service.sse import ablation_frames, stream
from service.store import ablations as store_ablations

router = APIRouter(prefix="/v1/ablations", tags=["ablations"])

_SEQ_MAX = 2**63 - 1
_NOT_MODIFIED: dict[int | str, dict[str, Any]] = {304: {"description": "The client has this already (If-None-Match)."}}


def _next_link(request: Request, cursor: str | None) -> dict[str, str]:
    if cursor is None:
        return {}
    kept = [(key, value) for key, value in request.query_params.multi_items() if key != "cursor"]
    return {"Link": f'<{request.url.path}?{urlencode([*kept, ("cursor", cursor)])}>; rel="next"'}


@router.get(
    "",
    operation_id="listAblations",
    summary="List ablations, newest first",
    response_model=Page[AblationPublic],
    responses={**secured(422), **_NOT_MODIFIED},
)
def list_ablations(
    request: Request,
    services: ServicesDep,
    principal: Reader,
    wanted: Annotated[AblationFilter, Query()],
) -> Response:
    """Return a page of ablations."""
    before = None if wanted.cursor is None else decode_cursor(wanted.cursor, str)[0]
    key, has_value, value = (wanted.label or "").partition("=")
    with services.store.read() as connection:
        rows = store_ablations.list_ablations(
            connection,
            before=before,
            limit=wanted.limit + 1,
            states=wanted.state,
            label=(key, value if has_value else None) if key else None,
            digest=wanted.digest,
        )
        shown = rows[: wanted.limit]
        labels = store_ablations.labels_of(connection, [row.id for row in shown])
        waiting = waiting_reasons(connection, shown, services.settings)
    url = services.settings.mlflow_url
    items = [ablation_public(r, labels[r.id], waiting_for=waiting.get(r.id), mlflow=url) for r in shown]
    following = encode_cursor(shown[-1].id) if len(rows) > wanted.limit else None
    page = Page[AblationPublic](items=items, next_cursor=following)
    return document(request, page, headers=_next_link(request, following))


@router.get(
    "/{ablation_id}",
    operation_id="getAblation",
    summary="Show an ablation",
    response_model=AblationPublic,
    responses={**secured(404, 422), **_NOT_MODIFIED},
)
def get_ablation(request: Request, ablation_id: AblationId, services: ServicesDep, principal: Reader) -> Response:
    """Return the ablation as it stands."""
    return document(request, _load(services, ablation_id))


def _load(services: ServicesDep, ablation_id: str) -> AblationPublic:
    with services.store.read() as connection:
        row = store_ablations.get_ablation(connection, ablation_id)
        labels = store_ablations.labels_of(connection, [ablation_id])[ablation_id]
        waiting = waiting_reasons(connection, [row], services.settings)
    return ablation_public(row, labels, waiting_for=waiting.get(row.id), mlflow=services.settings.mlflow_url)


@router.get(
    "/{ablation_id}/blocks",
    operation_id="listBlocks",
    summary="List the blocks of an ablation",
    response_model=Page[BlockPublic],
    responses={**secured(404, 422), **_NOT_MODIFIED},
)
def list_blocks(
    request: Request,
    ablation_id: AblationId,
    services: ServicesDep,
    principal: Reader,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Response:
    """Return a page of blocks, by index."""
    after = -1 if cursor is None else decode_cursor(cursor, int)[0]
    with services.store.read() as connection:
        store_ablations.get_ablation(connection, ablation_id)
        rows = store_ablations.list_blocks(connection, ablation_id, after=after, limit=limit + 1)
    items = [block_public(row) for row in rows[:limit]]
    following = encode_cursor(items[-1].index) if len(rows) > limit else None
    page = Page[BlockPublic](items=items, next_cursor=following)
    return document(request, page, headers=_next_link(request, following))


@router.get(
    "/{ablation_id}/trials",
    operation_id="listTrials",
    summary="List the trials of an ablation",
    response_model=Page[TrialPublic],
    responses={**secured(404, 422), **_NOT_MODIFIED},
)
def list_trials(
    request: Request,
    ablation_id: AblationId,
    services: ServicesDep,
    principal: Reader,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Response:
    """Return a page of trials, in running order."""
    after = (-1, -1) if cursor is None else decode_cursor(cursor, int, int)
    with services.store.read() as connection:
        store_ablations.get_ablation(connection, ablation_id)
        rows = store_ablations.list_trials(connection, ablation_id, after=(after[0], after[1]), limit=limit + 1)
    items = [trial_public(row) for row in rows[:limit]]
    following = encode_cursor(items[-1].block_index, items[-1].position) if len(rows) > limit else None
    page = Page[TrialPublic](items=items, next_cursor=following)
    return document(request, page, headers=_next_link(request, following))


@router.post(
    "/{ablation_id}:cancel",
    operation_id="cancelAblation",
    summary="Cancel an ablation",
    status_code=HTTPStatus.ACCEPTED,
    response_model=AblationPublic,
    responses=secured(404, 409, 422),
)
def cancel_ablation(ablation_id: AblationId, services: ServicesDep, principal: Submitter) -> AblationPublic:
    """Cancel queued blocks at once and running ones through their workers; repeating it changes nothing."""
    with services.store.write() as connection:
        store_ablations.cancel(connection, ablation_id, actor=principal.name)
    return _load(services, ablation_id)


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
    """Return the report: one self-contained page."""
    return HTMLResponse(_document(services, ablation_id, "report_html"))


def _document(services: ServicesDep, ablation_id: str, column: str) -> str:
    with services.store.read() as connection:
        row = store_ablations.get_document(connection, ablation_id, column)
    if row.document is None:
        name = column.partition("_")[0]
        raise NotYet(f"the ablation is {row.state}; its {name} is made when every block has ended")
    return str(row.document)


@router.get(
    "/{ablation_id}/events",
    operation_id="streamEvents",
    summary="Follow an ablation as server-sent events",
    response_class=Response,
    responses={
        200: {"description": "Events; `id` is the sequence number.", "content": {"text/event-stream": {}}},
        **secured(404, 422),
    },
)
def stream_events(
    request: Request,
    ablation_id: AblationId,
    services: ServicesDep,
    principal: Reader,
    last_event_id: Annotated[int, Header(ge=0, le=_SEQ_MAX, description="Replay what came after this one.")] = 0,
) -> Response:
    """Replay events after Last-Event-ID, follow new ones, and close with an `end` event."""
    with services.store.read() as connection:
        store_ablations.get_ablation(connection, ablation_id)
    state = request.app.state
    return stream(ablation_frames(services.store, ablation_id, last_event_id, stopping=lambda: bool(state.stopping)))
