"""Routes about tokens: create, list, replace and revoke them, their quotas, identities and sign-in links."""

from collections import defaultdict
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Path, Request
from sqlalchemy import Connection, Row

from ablate.experiments.ids import LISTED_NAME
from ablate.service.errors import Forbidden
from ablate.service.http.deps import Admin, Anyone, Operator, Reader, Services, ServicesDep, json_only
from ablate.service.http.responses import secured
from ablate.service.http.serializers import secret_public, token_public
from ablate.service.principals import Scope
from ablate.service.schemas.tokens import (
    Identity,
    QuotaRequest,
    RevokeRequest,
    RotateRequest,
    SecretPublic,
    SignInLink,
    SignInRequest,
    TokenList,
    TokenPublic,
    TokenRequest,
    TokenSecret,
)
from ablate.service.store.ablations import device_minutes
from ablate.service.store.access import tokens, web_sessions

router = APIRouter(prefix="/v1", tags=["tokens"])

SIGN_IN = "/sign-in"
"""Address of the page that accepts sign-in links."""
TokenName = Annotated[str, Path(pattern=LISTED_NAME)]


@router.get("/identity", operation_id="getIdentity", summary="Who am I", responses=secured())
def get_identity(services: ServicesDep, principal: Anyone) -> Identity:
    """Return the token's name, scope and quota, and the device minutes of its ablations."""
    with services.store.read() as connection:
        minutes_of = device_minutes.minutes_of(connection, [principal.token_id])
    minutes = minutes_of.get(principal.token_id, device_minutes.Minutes())
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
    """Return every token without its secrets, revoked ones too."""
    with services.store.read() as connection:
        return TokenList(items=_public(connection, tokens.list_tokens(connection)))


def _public(connection: Connection, rows: list[Row[Any]]) -> list[TokenPublic]:
    ids = [row.id for row in rows]
    minutes_of = device_minutes.minutes_of(connection, ids)
    secrets: dict[str, list[SecretPublic]] = defaultdict(list)
    for secret in tokens.secrets_of(connection, ids):
        secrets[secret.token_id].append(secret_public(secret))
    return [
        token_public(row, secrets=secrets[row.id], minutes=minutes_of.get(row.id, device_minutes.Minutes()))
        for row in rows
    ]


@router.post(
    "/tokens",
    operation_id="createToken",
    summary="Create a token",
    status_code=HTTPStatus.CREATED,
    dependencies=[Depends(json_only)],
    responses=secured(409, 413, 415, 422),
)
def create_token(wanted: TokenRequest, services: ServicesDep, principal: Admin) -> TokenSecret:
    """Create a token and return its secret, which is never shown again."""
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
    """Return a new secret; the old one stays valid for the grace period."""
    with services.store.write() as connection:
        secret = tokens.rotate(connection, name, grace_s=wanted.grace_s)
    services.authenticator.forget()
    return TokenSecret(name=name, node=tokens.node_of(name), secret=secret)


@router.post(
    "/tokens/{name:name}:end-old",
    operation_id="endOldSecrets",
    summary="End the replaced secrets of a token",
    responses=secured(404, 409, 422),
)
def end_old_secrets(name: TokenName, services: ServicesDep, principal: Admin) -> TokenPublic:
    """End the grace period of old secrets now."""
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
    """Limit the total device minutes of this token's ablations. Submitted ablations go on."""
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
    """End every secret of a token and free its name. Only operators may change its ablations from then on."""
    with services.store.write() as connection:
        tokens.revoke(connection, name, reason=wanted.reason)
    services.authenticator.forget()


@router.post(
    "/sign-ins",
    operation_id="createSignIn",
    summary="Create a link to sign in to the pages",
    status_code=HTTPStatus.CREATED,
    dependencies=[Depends(json_only)],
    responses=secured(413, 415, 422),
)
def create_sign_in(request: Request, wanted: SignInRequest, services: ServicesDep, principal: Reader) -> SignInLink:
    """Return a link that works once, for two minutes, and allows its user to read, or also to operate."""
    scope = Scope.OPERATE if wanted.operate else Scope.READ
    if not principal.scope.includes(scope):
        raise Forbidden(f"to operate needs a token with scope 'operate'; this one has '{principal.scope}'")
    secret = request.headers["authorization"].partition(" ")[2]
    with services.store.write() as connection:
        link = web_sessions.add_link(connection, principal.token_id, tokens.secret_digest(secret), scope)
    return SignInLink(path=f"{SIGN_IN}?{urlencode({'link': link})}", scope=scope, lasts_s=web_sessions.LINK_S)
