"""What happens to every request: an id, who asks, how large its head and body may be, and its place in the metrics.

Who asks is known before a byte of the body is read: a stranger's body costs nothing.
"""

import logging
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

from anyio import CapacityLimiter, to_thread
from fastapi import Request
from starlette.exceptions import HTTPException

from experiments.ids import new_id
from experiments.runtime.logs import requested_by
from service.errors import HeadTooLarge, Unauthorized
from service.http import problems
from service.http.authentication import Authenticator
from service.http.body_budget import BodyBudget
from service.http.connection_limits import MAX_HEAD_BYTES
from service.http.metrics import observe_request
from service.principals import Principal, Scope
from service.settings import ServiceSettings

HttpScope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[HttpScope, Receive, Send], Awaitable[None]]
Headers = dict[bytes, bytes]

log = logging.getLogger(__name__)

GIVEN_ID = r"[A-Za-z0-9._-]{8,64}"
_GIVEN_ID = re.compile(GIVEN_ID.encode())
_FOR_STRANGERS = frozenset({"/v1/schema/ablation.json"})
"""Below /v1 everything else needs a token."""
_LARGE_BODIES = {":report": Scope.WORKER, ":import": Scope.OPERATE}
"""Who may send a large body to which verb; anybody else gets the small limit there, too."""
_LOOKUP_THREADS = 2
"""For tokens that are not in the cache: strangers wait for each other, not the requests of others for them."""
_BUDGET_IN_REPORTS = 4


class RequestMiddleware:
    """Pure ASGI, so that streams stream and a submission pays microseconds for it."""

    def __init__(self, app: App, *, settings: ServiceSettings, authenticator: Authenticator) -> None:
        self._app = app
        self._settings = settings
        self._authenticator = authenticator
        self._lookups = CapacityLimiter(_LOOKUP_THREADS)
        self._budget = BodyBudget(_BUDGET_IN_REPORTS * settings.max_report_bytes)

    async def __call__(self, scope: HttpScope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: Headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given.decode() if _GIVEN_ID.fullmatch(given) else new_id("req")
        scope.setdefault("state", {})["request_id"] = request_id
        started, status = time.perf_counter(), HTTPStatus.INTERNAL_SERVER_ERROR.value

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*_marks(message["headers"], request_id), *message["headers"]]
            await send(message)

        with requested_by(request_id):
            try:
                await self._admit(scope, headers, receive, send_marked)
            finally:
                seconds = time.perf_counter() - started
                observe_request(scope, status, seconds)
                self._log(scope, status, seconds)

    async def _admit(self, scope: HttpScope, headers: Headers, receive: Receive, send: Send) -> None:
        try:
            _check_head(scope)
            principal = await self._principal(scope["path"], headers)
        except problems.ANSWERED as error:
            answer = await problems.answer(Request(scope), error)
            if _has_body(headers):
                answer.headers["Connection"] = "close"  # instead of reading to its end what nobody wants
            await answer(scope, receive, send)
            return
        with self._budget.share() as share:
            limit = self._limit(scope["path"], principal)
            await self._app(scope, _limited(receive, headers, limit, share.take), send)

    async def _principal(self, path: str, headers: Headers) -> Principal | None:
        """Return who asks, None where strangers may. Raises Unauthorized."""
        if not path.startswith("/v1/") or path in _FOR_STRANGERS:
            return None
        scheme, _, secret = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() != "bearer" or not secret:
            raise Unauthorized
        principal = self._authenticator.cached(secret)
        if principal is None:
            principal = await to_thread.run_sync(self._authenticator.lookup, secret, limiter=self._lookups)
        return principal

    def _limit(self, path: str, principal: Principal | None) -> int:
        for verb, needed in _LARGE_BODIES.items():
            if path.endswith(verb) and principal is not None and principal.scope.includes(needed):
                return self._settings.max_report_bytes
        return self._settings.max_body_bytes

    def _log(self, scope: HttpScope, status: int, seconds: float) -> None:
        if self._settings.log_requests:
            log.info("%s %a %d in %.1f ms", scope["method"], scope["path"], status, 1000 * seconds)


def _marks(headers: list[tuple[bytes, bytes]], request_id: str) -> list[tuple[bytes, bytes]]:
    marks = [(b"x-content-type-options", b"nosniff")]
    if not any(name == b"x-request-id" for name, _ in headers):
        marks.append((b"x-request-id", request_id.encode()))
    return marks


def _check_head(scope: HttpScope) -> None:
    size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    size += sum(len(name) + len(value) for name, value in scope["headers"])
    if size > MAX_HEAD_BYTES:
        raise HeadTooLarge(f"request line and headers have {size} bytes; allowed: {MAX_HEAD_BYTES}")


def _has_body(headers: Headers) -> bool:
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


def _limited(receive: Receive, headers: Headers, limit: int, take: Callable[[int], None]) -> Receive:
    declared = headers.get(b"content-length", b"")
    too_large = declared.isdigit() and int(declared) > limit
    seen = 0

    async def receive_limited() -> Message:
        nonlocal seen
        if too_large:
            raise _body_too_large(limit)
        message = await receive()
        piece = len(message.get("body", b""))
        seen += piece
        if seen > limit:
            raise _body_too_large(limit)
        take(piece)
        return message

    return receive_limited


def _body_too_large(limit: int) -> HTTPException:
    detail = f"the body is larger than the {limit} bytes allowed"
    return HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail, {"Connection": "close"})
