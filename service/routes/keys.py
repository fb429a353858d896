"""Routes about the keys that nodes sign with."""

from typing import Annotated

from fastapi import APIRouter, Body, Depends, Path

from experiments.records.signing import KEY_PATTERN, PublicKey
from service.http.deps import Operator, Reader, Services, ServicesDep, json_only
from service.http.responses import secured
from service.http.serializers import key_public
from service.schemas.nodes import KeyList
from service.schemas.tokens import REASON
from service.store.access import keys

router = APIRouter(prefix="/v1", tags=["catalogue"])

KeyPath = Annotated[PublicKey, Path(pattern=KEY_PATTERN)]
NodeName = Annotated[str, Body(embed=True, pattern="^[ -~]{1,120}$", examples=["gpu-7"])]
Reason = Annotated[str, Body(embed=True, pattern=REASON, examples=["the disk was stolen"])]


@router.get("/keys", operation_id="listKeys", summary="List the keys of nodes", responses=secured())
def list_keys(services: ServicesDep, principal: Reader) -> KeyList:
    """Return every key that was ever trusted, for whom, by whom, and which were revoked."""
    return _keys(services)


@router.post(
    "/keys/{key}:trust",
    operation_id="trustKey",
    summary="Trust a key for a node",
    dependencies=[Depends(json_only)],
    responses=secured(413, 415, 422),
)
def trust_key(key: KeyPath, node: NodeName, services: ServicesDep, principal: Operator) -> KeyList:
    """Take what this key signs for the node, in place of every other key of it."""
    with services.store.write() as connection:
        keys.replace(connection, node, key, by=principal.name)
    return _keys(services)


@router.post(
    "/keys/{key}:revoke",
    operation_id="revokeKey",
    summary="Revoke a key",
    dependencies=[Depends(json_only)],
    responses=secured(404, 413, 415, 422),
)
def revoke_key(key: KeyPath, reason: Reason, services: ServicesDep, principal: Operator) -> KeyList:
    """Take nothing more that this key signs; what was taken stays."""
    with services.store.write() as connection:
        keys.revoke(connection, key, reason=reason)
    return _keys(services)


def _keys(services: Services) -> KeyList:
    with services.store.read() as connection:
        return KeyList(items=[key_public(row) for row in keys.list_keys(connection)])
