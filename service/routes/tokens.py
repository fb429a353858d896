"""Routes about tokens: create, list, replace and revoke them, their quotas, and who somebody is."""

from collections import defaultdict
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path
from sqlalchemy import Connection, Row

from service.http.deps import Admin, Anyone, Operator, Services, ServicesDep, json_only
from service.http.responses import secured
from service.http.serializers import secret_public, token_public
from service.schemas.tokens import (
    HELD_NAME,
    Identity,
    QuotaRequest,
    RevokeRequest,
    RotateRequest,
    SecretPublic,
    TokenList,
    TokenPublic,
    TokenRequest,
    TokenSecret,
)
from service.store.ablations import quotas
from service.store.access import tokens

router = APIRouter(prefix="/v1", tags=["tokens"])

TokenName = Annotated[str, Path(pattern=HELD_NAME)]


@router.get("/identity", operation_id="getIdentity", summary="Who am I", responses=secured())
def get_identity(services: ServicesDep, principal: Anyone) -> Identity:
    """Return whose token this is, what it may do, and what its ablations have used."""
    with services.store.read() as connection:
        known = quotas.minutes_of(connection, [principal.token_id])
    minutes = known.get(principal.token_id, quotas.Minutes())
    return Identity(
        name=principal.name,
        scope=principal.scope,
        node=principal.node,
        node_class=principal.node_class,
        device_minutes=principal.device_minutes,
        device_minutes_used=minutes.used,
        device_minutes_reserved=minutes.reserved,
    )


@router.get("/tokens", operation_id="listTokens", summary="List tokens and keys of nodes", responses=secured())
def list_tokens(services: ServicesDep, principal: Operator) -> TokenList:
    """Return every token, revoked ones too, without any secret."""
    with services.store.read() as connection:
        return TokenList(items=_public(connection, tokens.list_tokens(connection)))


def _public(connection: Connection, rows: list[Row[Any]]) -> list[TokenPublic]:
    ids = [row.id for row in rows]
    minutes = quotas.minutes_of(connection, ids)
    held: dict[str, list[SecretPublic]] = defaultdict(list)
    for secret in tokens.secrets_of(connection, ids):
        held[secret.token_id].append(secret_public(secret))
    return [token_public(row, secrets=held[row.id], minutes=minutes.get(row.id, quotas.Minutes())) for row in rows]


@router.post(
    "/tokens",
    operation_id="createToken",
    summary="Create a token",
    status_code=HTTPStatus.CREATED,
    dependencies=[Depends(json_only)],
    responses=secured(409, 413, 415, 422),
)
def create_token(wanted: TokenRequest, services: ServicesDep, principal: Admin) -> TokenSecret:
    """Return the secret of a new token, once."""
    token = tokens.NewToken(name=wanted.name, scope=wanted.scope, device_minutes=wanted.device_minutes)
    with services.store.write() as connection:
        secret = tokens.create(connection, token, by=principal.name)
    return TokenSecret(name=wanted.name, node=None, secret=secret)


@router.post(
    "/tokens/{name:name}:rotate",
    operation_id="rotateToken",
    summary="Replace the secret of a token",
    dependencies=[Depends(json_only)],
    responses=secured(404, 409, 413, 415, 422),
)
def rotate_token(name: TokenName, wanted: RotateRequest, services: ServicesDep, principal: Admin) -> TokenSecret:
    """Return a fresh secret; the one before it counts until the grace is over."""
    with services.store.write() as connection:
        secret = tokens.rotate(connection, name, grace_s=wanted.grace_s)
    services.authenticator.forget()
    return TokenSecret(name=name, node=tokens.node_of(name), secret=secret)


@router.post(
    "/tokens/{name:name}:end-old",
    operation_id="endOldSecrets",
    summary="End the secrets of a token that were replaced",
    responses=secured(404, 409, 422),
)
def end_old_secrets(name: TokenName, services: ServicesDep, principal: Admin) -> TokenPublic:
    """Let the newest secret count alone, before the grace is over."""
    with services.store.write() as connection:
        tokens.end_old_secrets(connection, name)
    services.authenticator.forget()
    return _shown(services, name)


@router.post(
    "/tokens/{name:name}:set-quota",
    operation_id="setQuota",
    summary="Change the quota of a token",
    dependencies=[Depends(json_only)],
    responses=secured(404, 409, 413, 415, 422),
)
def set_quota(name: TokenName, wanted: QuotaRequest, services: ServicesDep, principal: Admin) -> TokenPublic:
    """Let the ablations of this token use so many device minutes in all. What was submitted before goes on."""
    with services.store.write() as connection:
        tokens.set_quota(connection, name, wanted.device_minutes)
    services.authenticator.forget()
    return _shown(services, name)


def _shown(services: Services, name: str) -> TokenPublic:
    with services.store.read() as connection:
        return _public(connection, [tokens.get_token(connection, name)])[0]


@router.post(
    "/tokens/{name:name}:revoke",
    operation_id="revokeToken",
    summary="Revoke a token",
    status_code=HTTPStatus.NO_CONTENT,
    dependencies=[Depends(json_only)],
    responses=secured(404, 409, 413, 415, 422),
)
def revoke_token(name: TokenName, wanted: RevokeRequest, services: ServicesDep, principal: Admin) -> None:
    """End every secret of a token. What it submitted stays and is owned by operators alone; the name is free again."""
    with services.store.write() as connection:
        tokens.revoke(connection, name, reason=wanted.reason)
    services.authenticator.forget()
