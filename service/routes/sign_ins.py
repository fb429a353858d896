"""The route that makes a link with which a person signs in to the pages, once."""

from http import HTTPStatus
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Request

from service.errors import Forbidden
from service.http.deps import Reader, ServicesDep, json_only
from service.http.responses import secured
from service.principals import Scope
from service.schemas.tokens import SignInLink, SignInRequest
from service.store.access import tokens, web_sessions

router = APIRouter(prefix="/v1", tags=["tokens"])

SIGN_IN = "/sign-in"
"""Address of the page that takes the link."""


@router.post(
    "/sign-ins",
    operation_id="createSignIn",
    summary="Make a link to sign in to the pages",
    status_code=HTTPStatus.CREATED,
    dependencies=[Depends(json_only)],
    responses=secured(413, 415, 422),
)
def create_sign_in(request: Request, wanted: SignInRequest, services: ServicesDep, principal: Reader) -> SignInLink:
    """Return a link that counts once, for two minutes. Who follows it reads as the token does, or also operates."""
    scope = Scope.OPERATE if wanted.operate else Scope.READ
    if not principal.scope.includes(scope):
        raise Forbidden(f"to operate needs a token with scope 'operate'; this one has '{principal.scope}'")
    secret = request.headers["authorization"].partition(" ")[2]
    with services.store.write() as connection:
        link = web_sessions.add_link(connection, principal.token_id, tokens.secret_digest(secret), scope)
    return SignInLink(path=f"{SIGN_IN}?{urlencode({'link': link})}", scope=scope, lasts_s=web_sessions.LINK_S)
