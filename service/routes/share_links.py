"""Routes about links that show one answer to people without a token."""

import logging
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Path
from sqlalchemy import Row

from ablate.experiments.ids import id_pattern
from ablate.service.http.deps import AblationId, Reader, ServicesDep, Submitter, json_only
from ablate.service.http.responses import secured
from ablate.service.schemas.share_links import ShareLink, ShareLinkList, ShareLinkPublic, ShareRequest
from ablate.service.store.ablations.ablations import check_exists
from ablate.service.store.access import share_links, tokens
from ablate.service.store.tables import rfc3339

log = logging.getLogger(__name__)

router = APIRouter(prefix="/v1/ablations", tags=["ablations"])

SHARE = "/share"
"""Path of the page that a link shows."""
ShareLinkId = Annotated[str, Path(pattern=id_pattern("shr"), examples=["shr_01KAHZ3V5T8QW2R4Y6M9N0P1S7"])]


@router.post(
    "/{ablation_id}:share",
    operation_id="shareAblation",
    summary="Create a link that shows the report to anybody",
    status_code=HTTPStatus.CREATED,
    dependencies=[Depends(json_only)],
    responses=secured(404, 409, 413, 415, 422),
)
def share_ablation(
    ablation_id: AblationId, wanted: ShareRequest, services: ServicesDep, principal: Submitter
) -> ShareLink:
    """Return a link to the report of this ablation and to nothing else. It needs no token, and ends by itself.

    Operators share any ablation, others only their own.
    """
    with services.store.write() as connection:
        tokens.check_owner(connection, principal, ablation_id)
        link_id, secret = share_links.add(connection, ablation_id, principal, lasts_s=wanted.hours * 3600)
        row = next(one for one in share_links.list_links(connection, ablation_id) if one.id == link_id)
    log.info("share link %s of %s made by %s, until %s", link_id, ablation_id, principal.name, rfc3339(row.ends_at))
    return ShareLink(link=_public(row), path=f"{SHARE}?{urlencode({'key': secret})}")


@router.get(
    "/{ablation_id}/shares",
    operation_id="listShareLinks",
    summary="List the share links of an ablation",
    responses=secured(404, 422),
)
def list_share_links(ablation_id: AblationId, services: ServicesDep, principal: Reader) -> ShareLinkList:
    """Return every link with its owner, its end and its uses, without its secret."""
    with services.store.read() as connection:
        check_exists(connection, ablation_id)
        return ShareLinkList(items=[_public(row) for row in share_links.list_links(connection, ablation_id)])


@router.post(
    "/{ablation_id}/shares/{share_id}:revoke",
    operation_id="revokeShareLink",
    summary="End a share link",
    responses=secured(404, 409, 422),
)
def revoke_share_link(
    ablation_id: AblationId, share_id: ShareLinkId, services: ServicesDep, principal: Submitter
) -> ShareLinkList:
    """End a link now. Operators end any, others those of their own ablations."""
    with services.store.write() as connection:
        tokens.check_owner(connection, principal, ablation_id)
        share_links.revoke(connection, ablation_id, share_id)
        items = [_public(row) for row in share_links.list_links(connection, ablation_id)]
    log.info("share link %s of %s revoked by %s", share_id, ablation_id, principal.name)
    return ShareLinkList(items=items)


def _public(row: Row[Any]) -> ShareLinkPublic:
    values = {
        name: rfc3339(value) if name.endswith("_at") and value is not None else value
        for name, value in row._asdict().items()
    }
    return ShareLinkPublic.model_validate(values)
