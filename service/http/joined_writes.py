"""A connection's transport that sends the head of an answer together with its body: each piece costs a system call.

It also wakes the reader, who would look at a head and wait again.
"""

from asyncio import AbstractEventLoop, Transport
from typing import Any


class JoinedWrites:
    """Holds a piece until the next one, or until the loop's turn is over; all else is the transport's own."""

    def __init__(self, transport: Transport, loop: AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held = b""

    def write(self, data: bytes) -> None:
        """Send `data` after what is held, or hold it: never more than one piece, so that the reader's pace is heard."""
        if self._held:
            whole, self._held = self._held + data, b""
            self._transport.write(whole)
        elif data:
            self._held = data
            self._loop.call_soon(self._send_held)

    def close(self) -> None:
        """Close after what is held was sent."""
        self._send_held()
        self._transport.close()

    def _send_held(self) -> None:
        if self._held:
            data, self._held = self._held, b""
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
