"""The visitor of a page: the session behind the cookie, and the token that proves where a form comes from."""

import hashlib
import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import parse_qs, urlsplit

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Request, Response
from sqlalchemy import Row

from ablate.service.errors import Forbidden, Invalid, Unauthorized, UnsupportedMediaType
from ablate.service.http.deps import Services, ServicesDep, media_type
from ablate.service.http.links import below
from ablate.service.principals import Principal, Scope
from ablate.service.store.access import web_sessions
from ablate.service.store.access.web_sessions import SESSION_S, SecretKind
from ablate.service.store.session import Store

COOKIE = "ablate_session"
FORM_TYPE = "application/x-www-form-urlencoded"
NOT_SIGNED_IN = "sign in to see this page"
_MOST_FIELDS = 10
_lookups = CapacityLimiter(2)
"""Callers without a session wait for each other, so they delay no other request."""


@dataclass(frozen=True, kw_only=True)
class Visitor:
    """The person who looks at a page."""

    principal: Principal
    """The token behind the session, with the session's scope: read or operate."""
    form_token: str
    """Part of every form of the session's pages; other sites cannot read it."""

    @property
    def may_operate(self) -> bool:
        """Whether pages offer operators' actions."""
        return self.principal.scope.includes(Scope.OPERATE)


def form_token(secret: str) -> str:
    """Return the form token of the session with this secret."""
    return hmac.new(secret.encode(), b"forms", hashlib.sha256).hexdigest()


def visits(scope: Scope) -> Callable[..., Awaitable[Visitor]]:
    """Return the dependency that requires a session with `scope` and counts the request against its token's rate."""

    async def check(request: Request, services: ServicesDep) -> Visitor:
        visitor = await visitor_of(request, services)
        if visitor is None:
            raise Unauthorized(NOT_SIGNED_IN)
        if not visitor.principal.scope.includes(scope):
            raise Forbidden(
                f"this session may only read; `ablate open --{scope}` makes a link for a session that may {scope}"
            )
        services.limiter.spend(visitor.principal.token_id)
        return visitor

    return check


async def visitor_of(request: Request, services: Services) -> Visitor | None:
    """Return the visitor; None without a valid session."""
    secret = request.cookies.get(COOKIE, "")
    row = await token_of(services.store, SecretKind.SESSION, secret)
    return None if row is None else Visitor(principal=principal_of(row), form_token=form_token(secret))


async def token_of(store: Store, kind: SecretKind, secret: str) -> Row[Any] | None:
    """Return the token behind a link or a session; None if it is not valid."""
    if not secret:
        return None
    return await to_thread.run_sync(_find, store, kind, secret, limiter=_lookups)


def _find(store: Store, kind: SecretKind, secret: str) -> Row[Any] | None:
    with store.read() as connection:
        return web_sessions.find(connection, kind, secret)


def principal_of(row: Row[Any]) -> Principal:
    """Return the principal of a session or a link: its token, with the session's own scope."""
    return Principal(token_id=row.id, name=row.name, scope=Scope(row.session_scope))


def set_cookie(request: Request, answer: Response, secret: str) -> None:
    """Store the session in the browser; no script can read it and no other site can use it."""
    secure = "https" in (request.url.scheme, request.headers.get("x-forwarded-proto"))  # a gateway may terminate TLS
    answer.set_cookie(
        COOKIE, secret, max_age=int(SESSION_S), path=below("/"), httponly=True, samesite="strict", secure=secure
    )


async def form_fields(request: Request) -> dict[str, str]:
    """Return the fields of the submitted form. Raises UnsupportedMediaType, Invalid."""
    if media_type(request) != FORM_TYPE:
        raise UnsupportedMediaType(f"content type {media_type(request)!r} is not supported; allowed: {FORM_TYPE}")
    try:
        fields = parse_qs((await request.body()).decode(), keep_blank_values=True, max_num_fields=_MOST_FIELDS)
    except ValueError as error:
        raise Invalid(f"the form cannot be read: {error}") from error
    return {name: values[-1] for name, values in fields.items()}


FormDep = Annotated[dict[str, str], Depends(form_fields)]
ReadingVisitor = Annotated[Visitor, Depends(visits(Scope.READ))]
_Operator = Annotated[Visitor, Depends(visits(Scope.OPERATE))]


def check_form(visitor: Visitor, form: dict[str, str]) -> None:
    """Raise Forbidden unless a form comes from a page of the visitor's own session."""
    if not hmac.compare_digest(form.get("form_token", "").encode(), visitor.form_token.encode()):
        raise Forbidden("this form does not come from a page of your session; reload the page and repeat the action")


def check_origin(request: Request) -> None:
    """Raise Forbidden if a browser says that a page of another origin sent this form.

    Programs and old browsers send neither header; a page cannot set them.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    hosts = {request.headers.get(name, "").lower() for name in ("host", "x-forwarded-host")}
    if site is not None:
        is_own = site in ("same-origin", "none")
    else:  # browsers send Sec-Fetch-Site only over HTTPS and to this machine
        is_own = origin is None or urlsplit(origin).netloc.lower() in hosts - {""}
    if not is_own:
        raise Forbidden("a page of another site sent this form; open the link itself and press its button")


async def _operating(visitor: _Operator, form: FormDep) -> Visitor:
    check_form(visitor, form)
    return visitor


LookingOperator = _Operator
ActingOperator = Annotated[Visitor, Depends(_operating)]
