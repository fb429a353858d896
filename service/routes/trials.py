"""Routes that read the receipt and the log of a trial."""

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response

from ablate.experiments.records.receipt_check import SignedReceipt
from ablate.service.errors import NotYet
from ablate.service.http.deps import Reader, ServicesDep, TrialId
from ablate.service.http.event_streams import LogPosition, streams_of
from ablate.service.http.pagination import text_like
from ablate.service.http.responses import event_content, secured
from ablate.service.schemas.ablations import LogPiece, StreamEnd
from ablate.service.store.ablations.ablations import get_receipt
from ablate.service.store.access.keys import block_signature
from ablate.service.store.files.logs import read_log

router = APIRouter(prefix="/v1/trials", tags=["trials"])

END_HEADER = "X-Log-End-Offset"
_OFFSET_MAX = 10**15 - 1
_PLACE = "^((0|[1-9][0-9]{0,8})-)?(0|[1-9][0-9]{0,14})$"


@router.get(
    "/{trial_id}/receipt",
    operation_id="getReceipt",
    summary="Show a trial's receipt with its block's signature",
    response_model=SignedReceipt,
    responses=secured(404, 409, 422),
)
def read_receipt(trial_id: TrialId, services: ServicesDep, principal: Reader) -> Response:
    """Return the receipt exactly as stored, with the signature of its block."""
    with services.store.read() as connection:
        row = get_receipt(connection, trial_id)
        signature = block_signature(connection, trial_id)
    if row.payload is None:
        raise NotYet(f"the trial is {row.state}; it has no receipt")
    signed = "null" if signature is None else signature.model_dump_json()
    text = f'{row.payload[:-1]},"signature":{signed}}}'
    return Response(text, media_type="application/json", headers={"ETag": f'"{row.digest}"'})


@router.get(
    "/{trial_id}/log",
    operation_id="getLog",
    summary="Read or follow a trial's log",
    response_class=Response,
    responses={
        200: {
            "description": "The log from `offset`, or a stream of it for `Accept: text/event-stream`.",
            "content": {"text/plain": {"schema": {"type": "string"}}, **event_content(LogPiece, StreamEnd)},
            "headers": {END_HEADER: {"description": "Offset of the next request.", "schema": {"type": "integer"}}},
        },
        **secured(404, 422),
    },
)
def read_trial_log(
    request: Request,
    trial_id: TrialId,
    services: ServicesDep,
    principal: Reader,
    offset: Annotated[int, Query(ge=0, le=_OFFSET_MAX, description="Absolute byte offset to begin at.")] = 0,
    last_event_id: Annotated[
        str | None,
        text_like(_PLACE),
        Header(pattern=_PLACE, description="Continue after this event; with another attempt the log begins again."),
    ] = None,
) -> Response:
    """Return the log of the newest attempt, at most 4 MiB; continue at X-Log-End-Offset.

    A stream begins again with each further attempt.
    """
    with services.store.read() as connection:
        page = read_log(connection, trial_id, offset=offset)
    if "text/event-stream" not in request.headers.get("accept", ""):
        headers = {END_HEADER: str(page.end_offset)}
        return Response(page.data, media_type="text/plain; charset=utf-8", headers=headers)
    place = LogPosition(None, offset) if last_event_id is None else LogPosition.of(last_event_id)
    return streams_of(request).of_log(principal, trial_id, place)
