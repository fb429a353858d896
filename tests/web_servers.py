"""Small HTTP servers for tests: one that records requests and answers all alike, and a reverse proxy."""

import http.client
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.waiting import LIMIT_S

ANSWER = {"items": [], "experiment": {"experiment_id": "1", "lifecycle_stage": "deleted", "name": "x", "tags": []}}
"""Good enough for the client, for a worker and for the SDK of MLflow."""


class WebServer:
    """A server and the requests that it got."""

    def __init__(self, *, status: int = 200, headers: dict[str, str] | None = None, tls: Path | None = None) -> None:
        """With `tls`, a folder with server.pem and server.key, the server speaks TLS."""
        self.got: list[tuple[str, dict[str, str]]] = []
        """Request lines and headers."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                server.got.append((self.requestline, dict(self.headers.items())))
                body = json.dumps(ANSWER).encode()
                self.send_response(status)
                for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PUT = do_CONNECT = _answer

            def log_message(self, *_: object) -> None:
                return

        self.server = _Quiet(("127.0.0.1", 0), Handler)
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls / "server.pem", tls / "server.key")
            self.server.socket = context.wrap_socket(
                self.server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.port = self.server.server_address[1]
        self.url = f"http{'' if tls is None else 's'}://127.0.0.1:{self.port}"

    @property
    def text(self) -> str:
        """Everything that was sent to the server."""
        return str(self.got)


class _Quiet(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore broken connections."""


@contextmanager
def serving(**options: Any) -> Iterator[WebServer]:
    """Run a server."""
    one = WebServer(**options)
    thread = threading.Thread(target=one.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield one
    finally:
        one.server.shutdown()
        one.server.server_close()
        thread.join()


class ReverseProxy:
    """Serves another server below a path. Requests outside of the path get 404, and are recorded."""

    def __init__(self, target_port: int, prefix: str, *, strips: bool) -> None:
        self.name = "strips" if strips else "keeps"
        self.outside: list[str] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def _forward(self) -> None:
                if not self.path.startswith(f"{prefix}/"):
                    proxy.outside.append(self.requestline)
                    self.send_error(404)
                    return
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                upstream = http.client.HTTPConnection("127.0.0.1", target_port, timeout=LIMIT_S)
                path = self.path.removeprefix(prefix) if strips else self.path
                upstream.request(self.command, path, body, dict(self.headers.items()))
                with closing(upstream), upstream.getresponse() as answer:
                    self._pass_on(answer)

            def _pass_on(self, answer: http.client.HTTPResponse) -> None:
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in {"transfer-encoding", "connection"}:
                        self.send_header(name, value)
                self.send_header("Connection", "close")
                self.end_headers()
                self.close_connection = True
                while piece := answer.read1(65_536):
                    self.wfile.write(piece)
                    self.wfile.flush()

            do_GET = do_POST = do_PUT = do_PATCH = _forward

            def log_message(self, *_: object) -> None:
                return

        self.server = _Quiet(("127.0.0.1", 0), Handler)
        self.origin = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.url = f"{self.origin}{prefix}"


@contextmanager
def proxying(target_port: int, prefix: str, *, strips: bool) -> Iterator[ReverseProxy]:
    """Run a reverse proxy."""
    proxy = ReverseProxy(target_port, prefix, strips=strips)
    threading.Thread(target=proxy.server.serve_forever, daemon=True).start()
    try:
        yield proxy
    finally:
        proxy.server.shutdown()
        proxy.server.server_close()
