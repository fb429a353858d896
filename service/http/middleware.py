"""The middleware of every request: its id, its principal, the limits of head and body, metrics and the log.

The principal is looked up before a byte of the body is read, so an unauthenticated body costs nothing.
"""

import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from anyio import CapacityLimiter, to_thread
from fastapi import Request
from starlette.exceptions import HTTPException

from ablate.experiments.ids import new_id
from ablate.experiments.system.logs import requested_by
from ablate.service.errors import Unauthorized
from ablate.service.http import problems
from ablate.service.http.authentication import Authenticator
from ablate.service.http.links import inner_path, served_below
from ablate.service.http.metrics import observe_request
from ablate.service.principals import Principal, Scope
from ablate.service.settings import ServiceSettings

HttpScope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[HttpScope, Receive, Send], Awaitable[None]]
Headers = dict[bytes, bytes]

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{8,64}")
_PUBLIC = frozenset({"/v1/schema/ablation.json"})
"""Paths below /v1 that need no token."""
_LARGE_BODIES = {":report": Scope.WORKER, ":import": Scope.OPERATE, ":upload": Scope.CODE}
"""The scope that may send a large body, by verb; others have the small limit there too."""
_LOOKUP_THREADS = 2
"""For tokens that are not in the cache: unknown tokens delay each other, never other requests."""
_BUDGET_IN_REPORTS = 4
"""Of workers, and again of other tokens."""
_FORM_BYTES = 65_536
"""Largest body without a token: a form of the pages."""
_FORMS_AT_ONCE = 256
_RETRY_S = 2


class BodyBudget:
    """Limits the total bytes of one class of callers' bodies that the process holds in memory."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._total = 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts bytes of one request; release all of them at the end.

        The function raises HTTPException (503) instead of exceeding the budget.
        """
        own = 0

        def take(count: int) -> None:
            nonlocal own
            if count and self._total + count > self._most:
                detail = f"bodies of {self._total} bytes are being read; allowed at once: {self._most}. Retry later"
                headers = {"Retry-After": str(_RETRY_S), "Connection": "close"}
                raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, detail, headers)
            self._total += count
            own += count

        try:
            yield take
        finally:
            self._total -= own


class RequestMiddleware:
    """Pure ASGI middleware, so that it neither buffers streams nor costs more than microseconds."""

    def __init__(self, app: App, *, settings: ServiceSettings, authenticator: Authenticator) -> None:
        self._app = app
        self._settings = settings
        self._authenticator = authenticator
        self._lookups = CapacityLimiter(_LOOKUP_THREADS)
        self._workers, self._tokens = (BodyBudget(_BUDGET_IN_REPORTS * settings.max_report_bytes) for _ in range(2))
        self._strangers = BodyBudget(_FORMS_AT_ONCE * _FORM_BYTES)

    async def __call__(self, scope: HttpScope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        root = self._settings.root_path
        path = inner_path(scope["path"], root)
        scope["root_path"], scope["path"] = root, root + path
        headers: Headers = dict(scope["headers"])
        sent_id = headers.get(b"x-request-id", b"")
        request_id = sent_id.decode() if _REQUEST_ID.fullmatch(sent_id) else new_id("req")
        scope.setdefault("state", {})["request_id"] = request_id
        started, status = time.perf_counter(), HTTPStatus.INTERNAL_SERVER_ERROR.value

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*_extra_headers(message["headers"], request_id), *message["headers"]]
            await send(message)

        with requested_by(request_id), served_below(root):
            try:
                await self._admit(scope, path, headers, receive, send_with_headers)
            finally:
                seconds = time.perf_counter() - started
                observe_request(scope, status, seconds)
                self._log(scope, status, seconds)

    async def _admit(self, scope: HttpScope, path: str, headers: Headers, receive: Receive, send: Send) -> None:
        try:
            principal = await self._principal(path, headers)
        except problems.ANSWERED as error:
            answer = await problems.answer(Request(scope), error)
            if _has_body(headers):
                answer.headers["Connection"] = "close"  # instead of reading an unwanted body
            await answer(scope, receive, send)
            return
        scope["state"]["principal"] = principal
        with self._budget(principal).share() as take:
            limit = self._limit(path, principal)
            await self._app(scope, _limited(receive, headers, limit, take), send)

    async def _principal(self, path: str, headers: Headers) -> Principal | None:
        """Return the principal, None for a public path. Raises Unauthorized."""
        if not path.startswith("/v1/") or path in _PUBLIC:
            return None
        scheme, _, secret = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() != "bearer" or not secret:
            raise Unauthorized
        principal = self._authenticator.cached(secret)
        if principal is None:
            principal = await to_thread.run_sync(self._authenticator.lookup, secret, limiter=self._lookups)
        return principal

    def _budget(self, principal: Principal | None) -> BodyBudget:
        """Return the budget of the caller's class, so that no worker's call waits for a stranger's body."""
        if principal is None:
            return self._strangers
        return self._workers if principal.scope == Scope.WORKER else self._tokens

    def _limit(self, path: str, principal: Principal | None) -> int:
        if principal is None:
            return min(_FORM_BYTES, self._settings.max_body_bytes)
        for verb, needed in _LARGE_BODIES.items():
            if path.endswith(verb) and principal.scope.includes(needed):
                return self._settings.max_report_bytes
        return self._settings.max_body_bytes

    def _log(self, scope: HttpScope, status: int, seconds: float) -> None:
        if self._settings.log_requests:
            log.info("%s %a %d in %.1f ms", scope["method"], scope["path"], status, 1000 * seconds)


def _extra_headers(headers: list[tuple[bytes, bytes]], request_id: str) -> list[tuple[bytes, bytes]]:
    extra = [(b"x-content-type-options", b"nosniff")]
    if not any(name == b"x-request-id" for name, _ in headers):
        extra.append((b"x-request-id", request_id.encode()))
    return extra


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
