"""A cheap HTTP client: one keep-alive connection, requests built by hand. Not shared between threads."""

import json
import socket
from types import TracebackType
from typing import Any


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
        return self._read_answer()

    def _read_answer(self) -> tuple[int, bytes]:
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._receive()
        head, _, body = data.partition(b"\r\n\r\n")
        status, *fields = head.decode("latin-1").split("\r\n")
        lengths = [int(f.partition(":")[2]) for f in fields if f.lower().startswith("content-length:")]
        pieces, missing = [body], sum(lengths) - len(body)
        while missing > 0:
            pieces.append(self._receive())
            missing -= len(pieces[-1])
        return int(status.split()[1]), b"".join(pieces)

    def _receive(self) -> bytes:
        data = self._connection.recv(65536)
        if not data:
            raise ConnectionError("the server closed the connection")
        return data
