"""A client that costs little: one keep-alive connection, requests built by hand. Not shared between threads."""

import json
import socket
from types import TracebackType
from typing import Any

from tests.bench.load import read_answer


class PlainClient:
    """Sends one request after another on one connection."""

    def __init__(self, port: int) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> "PlainClient":
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self._connection.close()

    def send(self, method: str, path: str, headers: dict[str, str], body: Any = None) -> tuple[int, bytes]:
        """Send a request, with a JSON body unless it is None; return the answer's status and body."""
        content = b"" if body is None else json.dumps(body).encode()
        fields = {"Host": "127.0.0.1", "Content-Length": str(len(content)), **headers}
        if content:
            fields["Content-Type"] = "application/json"
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._connection.sendall(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + content)
        return read_answer(self._connection)
