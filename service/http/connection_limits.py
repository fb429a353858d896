"""Limits of one HTTP connection: the size of a head, the time for a request, and the time for a slow reader.

uvicorn's own protocol waits for ever for the rest of a request and accepts a head of any size.
"""

import json
from asyncio import TimerHandle, Transport
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 65_536
"""Request line, headers and everything else of a request that is not its body, such as trailers."""
HEAD_S = 30.0
"""From the connection, or the first byte of a further request, to the end of its headers."""
BODY_S = 120.0
"""From the end of the headers to the end of the body."""
STUCK_S = 60.0
"""For a reader that reads nothing while its answer waits to be sent."""
_FRAMING = 8
"""Bytes of chunk framing allowed for each byte of a body: a chunk of one byte has five."""
_REFUSAL = {
    "type": "urn:ablate:problem:head-too-large",
    "title": "Request Header Fields Too Large",
    "status": 431,
    "detail": f"request line and headers are larger than the {MAX_HEAD_BYTES} bytes allowed",
}


class BoundedHttp(HttpToolsProtocol):
    """Closes the connection of a client that is too slow, sends too much besides a body, or stops reading."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._began = False
        self._unexplained = 0
        """Bytes of the latest piece that are not part of a body."""
        self._overhead = 0
        """Bytes of the current request that are not part of its body."""
        self._deadline: TimerHandle | None = None
        self._stuck: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # as uvicorn declares it
        """Start the timer of the first request."""
        super().connection_made(transport)
        self._expect(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._expect(None)
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, then count the bytes that are not part of a body."""
        self._began, self._unexplained = False, len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        # the share of this piece before the request began is unknown: at most one piece is not counted
        self._overhead = 0 if self._began else self._overhead + self._unexplained
        if self._overhead > MAX_HEAD_BYTES:
            self._refuse()
        elif self._deadline is None and self.timeout_keep_alive_task is None and self._is_idle:
            self._expect(HEAD_S)  # bytes that begin no request ended the timer of the keep-alive

    def on_message_begin(self) -> None:
        """Start the timer and the count of a request."""
        super().on_message_begin()
        self._began = True
        self._expect(HEAD_S)

    def on_headers_complete(self) -> None:
        """Start the timer of the body."""
        super().on_headers_complete()
        self._expect(BODY_S)

    def on_body(self, body: bytes) -> None:
        """Exclude a piece of the body, with its framing, from the count."""
        self._unexplained -= _FRAMING * len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the timer: the request is complete."""
        super().on_message_complete()
        self._expect(None)

    def pause_writing(self) -> None:
        """Start the timer of a reader that reads nothing."""
        super().pause_writing()
        if self._stuck is None:
            self._stuck = self.loop.call_later(STUCK_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop that timer: the reader continued."""
        super().resume_writing()
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect(self, seconds: float | None) -> None:
        """Close the connection unless the next step comes within `seconds`; None stops the timer."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._too_slow)

    def _too_slow(self) -> None:
        self._deadline = None
        self.transport.abort()

    def _refuse(self) -> None:
        """Send the problem unless an answer has begun, and close."""
        if self._is_idle:
            body = json.dumps(_REFUSAL).encode()
            head = (
                b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/problem+json\r\n"
                b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            )
            self.transport.write(head + body)
        self.transport.close()
