"""Many event streams at once, read by one thread over plain sockets."""

import selectors
import socket
import threading
from collections.abc import Sequence

_HEAD = (
    "GET /v1/ablations/{ablation}/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
    "Accept: text/event-stream\r\n\r\n"
)


class Streams:
    """Opens one stream for each ablation named and counts what comes."""

    def __init__(self, port: int, token: str, ablations: Sequence[str]) -> None:
        self.events = 0
        self.closed = 0
        self._selector = selectors.DefaultSelector()
        self._sockets: list[socket.socket] = []
        for ablation in ablations:
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(_HEAD.format(ablation=ablation, token=token).encode())
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ)
            self._sockets.append(connection)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Streams":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.close()

    def close(self) -> None:
        """End every stream."""
        for connection in self._sockets:
            connection.close()

    @property
    def open(self) -> int:
        """Return how many streams the server has not closed."""
        return len(self._sockets) - self.closed

    def _run(self) -> None:
        while not self._over.is_set():
            self.read(patience_s=0.2)

    def read(self, *, patience_s: float) -> None:
        """Read what has come, or comes next."""
        for key, _ in self._selector.select(timeout=patience_s):
            self._read(key)

    def _read(self, key: selectors.SelectorKey) -> None:
        connection = key.fileobj
        assert isinstance(connection, socket.socket)
        try:
            data = connection.recv(262_144)
        except OSError:
            data = b""
        self.events += data.count(b"\nevent: ") + data.startswith(b"event: ")
        if not data:
            self._selector.unregister(connection)
            self.closed += 1
