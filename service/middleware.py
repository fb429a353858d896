"""What happens to every request: an id, a size limit while its body streams in, and its place in the metrics."""

import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException

from experiments.ids import new_id
from service.metrics import observe_request
from service.settings import ServiceSettings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_GIVEN_ID = re.compile(rb"[A-Za-z0-9._-]{8,64}")


class RequestMiddleware:
    """Pure ASGI, so that streams stream and a submission pays microseconds for it."""

    def __init__(self, app: App, *, settings: ServiceSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given.decode() if _GIVEN_ID.fullmatch(given) else new_id("req")
        scope.setdefault("state", {})["request_id"] = request_id
        started, status = time.perf_counter(), HTTPStatus.INTERNAL_SERVER_ERROR.value

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if not any(name == b"x-request-id" for name, _ in message["headers"]):
                    message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, self._limited(scope, headers, receive), send_marked)
        finally:
            observe_request(scope, status, time.perf_counter() - started)

    def _limited(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive) -> Receive:
        carries_receipts = scope["path"].endswith((":report", ":import"))
        limit = self._settings.max_report_bytes if carries_receipts else self._settings.max_body_bytes
        declared = headers.get(b"content-length", b"")
        too_large = declared.isdigit() and int(declared) > limit
        seen = 0

        async def receive_limited() -> Message:
            nonlocal seen
            if too_large:
                raise _body_too_large(limit)
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > limit:
                raise _body_too_large(limit)
            return message

        return receive_limited


def _body_too_large(limit: int) -> HTTPException:
    detail = f"the body is larger than the {limit} bytes allowed"
    return HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail, {"Connection": "close"})
