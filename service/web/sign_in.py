"""Signing in by a link that works once, signing out, and the page of a share link."""

import logging
from http import HTTPStatus
from typing import Annotated, Any

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse
from sqlalchemy import Row

from ablate.service.errors import NotFound, NotYet, Unauthorized
from ablate.service.http.deps import ServicesDep
from ablate.service.http.links import below
from ablate.service.http.responses import html_page
from ablate.service.routes.share_links import SHARE
from ablate.service.routes.tokens import SIGN_IN
from ablate.service.store.access import share_links, web_sessions
from ablate.service.store.access.web_sessions import SecretKind
from ablate.service.store.session import Store
from ablate.service.web.html import PageRoute, page
from ablate.service.web.sessions import (
    COOKIE,
    FormDep,
    ReadingVisitor,
    check_form,
    check_origin,
    principal_of,
    set_cookie,
    token_of,
)

log = logging.getLogger(__name__)

router = APIRouter(include_in_schema=False, route_class=PageRoute)

USED_UP = "this link was used before, or is older than two minutes; `ablate open` makes a new one"
NOT_SHARED = "this link ended, was revoked, or never existed; ask the person who sent it for a new one"
_shared = CapacityLimiter(2)
"""Readers of share links wait for each other, so they delay no other request."""
_TARGET = r"^/((a|sessions)/[A-Za-z0-9_-]{1,80})?$"
Target = Annotated[str, Query(pattern=_TARGET)]


@router.get(SIGN_IN)
async def show_sign_in(request: Request, services: ServicesDep, link: str = "", to: Target = "/") -> Response:
    """Show the link's owner and a button, so that programs which only follow links do not use it up."""
    row = await token_of(services.store, SecretKind.LINK, link)
    if row is None:
        raise Unauthorized(USED_UP)
    answer = page(request, "sign_in.html", who=principal_of(row), link=link, to=to, visitor=None)
    answer.headers["Referrer-Policy"] = "same-origin"  # with no-referrer a browser would hide the form's own origin
    return answer


@router.post(SIGN_IN)
async def sign_in(request: Request, services: ServicesDep, form: FormDep, to: Target = "/") -> Response:
    """Turn the link into a session; it works once. A form of another site does not use it up."""
    check_origin(request)
    link = form.get("link", "")
    row = await token_of(services.store, SecretKind.LINK, link)
    secret = None if row is None else await to_thread.run_sync(_use, services.store, link)
    if secret is None:
        raise Unauthorized(USED_UP)
    answer = RedirectResponse(below(to), HTTPStatus.SEE_OTHER, {"Cache-Control": "no-store"})
    set_cookie(request, answer, secret)
    return answer


def _use(store: Store, link: str) -> str | None:
    with store.write() as connection:
        return web_sessions.use_link(connection, link)


@router.get(SHARE)
async def show_shared(services: ServicesDep, key: str = "") -> Response:
    """Show the report behind a share link, and nothing else. It needs no session and gives none."""
    row = await to_thread.run_sync(_use_share, services.store, key, limiter=_shared) if key else None
    if row is None:
        raise NotFound(NOT_SHARED)
    log.info("share link %s shows %s", row.id, row.ablation_id)
    if row.report_html is None:
        raise NotYet(f"the ablation is {row.state}, and its report is not written yet; open the link again later")
    answer = html_page(row.report_html)
    answer.headers.update({"Cache-Control": "no-store", "X-Robots-Tag": "noindex"})
    return answer


def _use_share(store: Store, secret: str) -> Row[Any] | None:
    with store.read() as connection:  # strangers write nothing
        row = share_links.find(connection, secret)
    if row is not None:
        with store.write() as connection:
            share_links.count_use(connection, row.id)
    return row


@router.post("/sign-out")
async def sign_out(request: Request, services: ServicesDep, visitor: ReadingVisitor, form: FormDep) -> Response:
    """End the session in the browser and in the database."""
    check_form(visitor, form)
    await to_thread.run_sync(_end, services.store, request.cookies[COOKIE])
    answer = page(request, "signed_out.html", visitor=None)
    answer.delete_cookie(COOKIE, path=below("/"), httponly=True, samesite="strict")
    return answer


def _end(store: Store, secret: str) -> None:
    with store.write() as connection:
        web_sessions.end(connection, secret)
