"""Routes of code that people send: which archives are missing, upload, and download by the node that runs it."""

import hashlib
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from ablate.experiments.errors import SpecProblem
from ablate.experiments.records.code_archive import PIECE_BYTES
from ablate.experiments.records.code_tree import MOST_BYTES
from ablate.service.errors import Invalid, UnsupportedMediaType
from ablate.service.http.deps import (
    AblationId,
    AttemptId,
    Coder,
    LongRoute,
    Services,
    ServicesDep,
    Worker,
    json_only,
    media_type,
)
from ablate.service.http.responses import secured
from ablate.service.schemas.submissions import CodeDigest, CodeMissing, CodeShare, CodeShared, CodeStored, CodeWanted
from ablate.service.store.access import tokens
from ablate.service.store.files import code_archives
from ablate.service.store.nodes import nodes

router = APIRouter(prefix="/v1", tags=["submissions"], route_class=LongRoute)

MEDIA_TYPE = "application/gzip"
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "A tar archive compressed with gzip, of at most 64 MiB. The service never unpacks it.",
        "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    }
}
_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {"description": "The archive.", "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}}
}


@router.post(
    "/code:find", operation_id="findCode", summary="Say which archives are missing", responses=secured(413, 415, 422)
)
def find_code(wanted: CodeWanted, services: ServicesDep, principal: Coder) -> CodeMissing:
    """Return the archives that this token has to send. The others are kept for ABLATE_CODE_DAYS from now.

    An archive that only others have sent counts as missing.
    """
    with services.store.write() as connection:
        user = code_archives.user_of(principal)
        return CodeMissing(missing=code_archives.lacking(connection, wanted.digests, user=user))


async def _pieces(request: Request) -> list[bytes]:
    """Return the body in pieces of `PIECE_BYTES`, the last one smaller; it is in memory once."""
    if media_type(request) != MEDIA_TYPE:
        raise UnsupportedMediaType(f"content type {media_type(request)!r} is not supported; allowed: {MEDIA_TYPE}")
    pieces, last = [], bytearray()
    async for chunk in request.stream():
        last += chunk
        while len(last) >= PIECE_BYTES:
            pieces.append(bytes(last[:PIECE_BYTES]))
            del last[:PIECE_BYTES]
    return [*pieces, bytes(last)] if last else pieces


@router.post(
    "/code:upload",
    operation_id="uploadCode",
    summary="Store an archive of code",
    response_model=CodeStored,
    responses=secured(413, 415, 422, 507),
    openapi_extra=_BODY,
)
def upload_code(
    principal: Coder,
    services: ServicesDep,
    digest: Annotated[CodeDigest, Query(description="Digest of the body, which the service checks.")],
    pieces: Annotated[list[bytes], Depends(_pieces)],
) -> CodeStored:
    """Store the archive for this token. Sending it again changes nothing but the time of its last use."""
    whole = hashlib.sha256()
    for piece in pieces:
        whole.update(piece)
    size = sum(map(len, pieces))
    if digest != f"sha256:{whole.hexdigest()}":
        detail = f"the body has digest sha256:{whole.hexdigest()} and {size} bytes, not {digest}: send it again"
        raise Invalid(problems=[SpecProblem(pointer="query:digest", detail=detail)])
    if not 0 < size <= MOST_BYTES:
        raise Invalid(f"the archive has {size:,} bytes; allowed: 1 to {MOST_BYTES:,}")
    with services.store.write() as connection:
        stored = code_archives.store_archive(
            connection,
            digest,
            pieces,
            sender=principal,
            most_bytes=services.settings.max_code_bytes,
        )
    return CodeStored(digest=digest, size=size, changed=stored)


@router.get(
    "/code/{digest}",
    operation_id="getCode",
    summary="Download code that this token may use",
    response_class=Response,
    responses={**_ANSWER, **secured(404, 422)},
)
def get_code(digest: Annotated[CodeDigest, Path()], services: ServicesDep, principal: Coder) -> Response:
    """Return an archive that this token sent, or that its sender shared with it; operators get any."""
    with services.store.read() as connection:
        size = code_archives.size_for_user(connection, digest, user=code_archives.user_of(principal))
    return _download(services, digest, size)


@router.post(
    "/ablations/{ablation_id}:share-code",
    operation_id="shareCode",
    summary="Let another token use the code of an ablation",
    tags=["ablations"],
    dependencies=[Depends(json_only)],
    responses=secured(404, 409, 413, 415, 422),
)
def share_code(ablation_id: AblationId, wanted: CodeShare, services: ServicesDep, principal: Coder) -> CodeShared:
    """Let the token `name` submit with the archives of this ablation, and see their digests. It cannot be undone.

    Senders share their own code, operators any.
    """
    with services.store.write() as connection:
        tokens.check_owner(connection, principal, ablation_id)
        token = tokens.get_token(connection, wanted.name)
        new = code_archives.share(connection, ablation_id, principal, token.id)
    return CodeShared(name=wanted.name, digests=new)


@router.get(
    "/attempts/{attempt_id}/code/{digest}",
    operation_id="downloadCode",
    summary="Download code of a claimed block",
    tags=["workers"],
    response_class=Response,
    responses={**_ANSWER, **secured(404, 409, 422)},
)
def download_code(
    attempt_id: AttemptId, digest: Annotated[CodeDigest, Path()], services: ServicesDep, principal: Worker
) -> Response:
    """Return an archive that the block of a running attempt of this node uses."""
    with services.store.read() as connection:
        nodes.node_of_attempt(connection, attempt_id, owner=principal.node)
        size = code_archives.size_for_attempt(connection, attempt_id, digest)
    return _download(services, digest, size)


def _download(services: Services, digest: str, size: int) -> Response:
    pieces = code_archives.read_pieces(services.store, digest)
    return StreamingResponse(pieces, HTTPStatus.OK, {"Content-Length": str(size)}, MEDIA_TYPE)
