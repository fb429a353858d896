"""The socket on which the messages of a program arrive. The kernel adds to each of them its moment and its sender."""

import math
import secrets
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

_MESSAGE_BYTES, _ANCILLARY_BYTES = 262_144, 256
_SO_TIMESTAMPNS = 35  # Linux; the module socket has no name for it
_STAMP = struct.Struct("qq")
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, kw_only=True)
class ProgramMessage:
    """One message as it arrived."""

    content: bytes
    seen: float
    """When the kernel queued it, in seconds of the wall clock; NaN if it does not say."""
    sender: int
    """The process that sent it, 0 if the kernel does not say."""


class ProgramSocket:
    """A socket in the abstract namespace."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.address = f"\0ablate-trial-{secrets.token_hex(16)}"
        self._socket.bind(self.address)
        self._socket.setblocking(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def fileno(self) -> int:
        """Return its descriptor."""
        return self._socket.fileno()

    def messages(self) -> Iterator[ProgramMessage]:
        """Yield the messages that have arrived."""
        while True:
            try:
                content, ancillary, _flags, _address = self._socket.recvmsg(_MESSAGE_BYTES, _ANCILLARY_BYTES)
            except BlockingIOError:
                return
            seen, sender = math.nan, 0
            for _level, kind, data in ancillary:
                if kind == _SO_TIMESTAMPNS:
                    seconds, nanoseconds = _STAMP.unpack(data[: _STAMP.size])
                    seen = int(seconds) + int(nanoseconds) / 1e9
                elif kind == socket.SCM_CREDENTIALS:
                    sender = int(_CREDENTIALS.unpack(data[: _CREDENTIALS.size])[0])
            yield ProgramMessage(content=content, seen=seen, sender=sender)
