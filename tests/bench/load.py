"""A load generator that costs little: threads with one keep-alive connection each, requests built by hand."""

import json
import socket
import sys
import threading
import time
from uuid import uuid4

HEAD = (
    "POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nAuthorization: Bearer {token}\r\n"
    "Idempotency-Key: {key}\r\nContent-Length: {length}\r\n\r\n"
)


class Client(threading.Thread):
    """Sends one request after another until the time is over."""

    def __init__(self, port: int, path: str, *, token: str, body: bytes, until: float) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self.failures: list[str] = []
        self._port, self._path, self._token = port, path, token
        self._body, self._until = body, until

    def run(self) -> None:
        with socket.create_connection(("127.0.0.1", self._port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while time.perf_counter() < self._until:
                started = time.perf_counter()
                head = HEAD.format(path=self._path, token=self._token, key=uuid4().hex, length=len(self._body))
                connection.sendall(head.encode() + self._body)
                status, body = read_answer(connection)
                self.seconds.append(time.perf_counter() - started)
                if status // 100 != 2:
                    self.failures.append(f"{status} {body[:200]!r}")


def read_answer(connection: socket.socket) -> tuple[int, bytes]:
    """Read one whole answer; return its status and body."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _receive(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    status, *fields = head.decode("latin-1").split("\r\n")
    lengths = [int(f.partition(":")[2]) for f in fields if f.lower().startswith("content-length:")]
    pieces, missing = [body], sum(lengths) - len(body)
    while missing > 0:
        pieces.append(_receive(connection))
        missing -= len(pieces[-1])
    return int(status.split()[1]), b"".join(pieces)


def _receive(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    if not data:
        raise ConnectionError("the server closed the connection")
    return data


def main() -> None:
    """Run `load.py PORT PATH TOKEN CLIENTS SECONDS` with the body on stdin; print rate, latencies and failures."""
    port, path, token, clients, seconds = sys.argv[1:6]
    body, started = sys.stdin.buffer.read(), time.perf_counter()
    until = started + float(seconds)
    threads = [Client(int(port), path, token=token, body=body, until=until) for _ in range(int(clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall_s = time.perf_counter() - started
    took = sorted(second for thread in threads for second in thread.seconds)
    failures = [failure for thread in threads for failure in thread.failures]
    answer = {
        "count": len(took),
        "rate": len(took) / wall_s,
        "p50_ms": 1000 * took[len(took) // 2],
        "p99_ms": 1000 * took[int(len(took) * 0.99)],
        "failures": failures[:3],
    }
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
