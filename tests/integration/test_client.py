import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from ablate.service.client.api import Client, Refused, ServiceFailed, Unreachable
from ablate.service.schemas.submissions import SpecBody
from tests.api_stack import nobody_url

ACCEPTED = {
    "id": "abl_1",
    "name": "demo",
    "state": "queued",
    "spec_digest": "sha256:0",
    "rule_digest": "sha256:1",
    "plan": {
        "arms": ["baseline", "a"],
        "blocks": 6,
        "trials": 12,
        "node_class": "cpu",
        "devices": 1,
        "mde_pct_per_sd_pct": 1.4,
        "expected_device_minutes": None,
    },
    "warnings": [],
    "links": dict.fromkeys(("self", "events", "verdict", "report", "cancel"), "/v1/x"),
    "a_field_of_a_newer_service": 1,
}


def _sse(seq: int, kind: str, **values: Any) -> bytes:
    return f"id: {seq}\nevent: {kind}\ndata: {json.dumps({'seq': seq, 'kind': kind, **values})}\n\n".encode()


class _Service(BaseHTTPRequestHandler):
    """Answers like the service where that is simple, and breaks where the client must cope."""

    seen: list[tuple[str, str, dict[str, str]]]
    failures_left: int
    busy: list[dict[str, str]]
    """Headers of the answers 503 that come first."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        return

    def do_GET(self) -> None:
        self._note()
        if self.path.endswith("/events"):
            self._events(int(self.headers["Last-Event-ID"]))
        elif self.path.endswith("/verdict"):
            body = {"type": "urn:x", "title": "Conflict", "status": 409, "detail": "not yet", "errors": []}
            self._answer(409, json.dumps(body).encode(), "application/problem+json")
        elif "/log" in self.path:
            self._answer(200, "größer".encode(), "text/plain; charset=utf-8", {"X-Log-End-Offset": "8"})
        else:
            self._answer(502, b"<html>proxy</html>", "text/html")

    def do_POST(self) -> None:
        self._note()
        self.rfile.read(int(self.headers["Content-Length"]))
        if type(self).failures_left:
            type(self).failures_left -= 1
            self.close_connection = True
            return
        if type(self).busy:
            body = {"type": "urn:x", "title": "Busy", "status": 503, "detail": "Retry later", "errors": []}
            self._answer(503, json.dumps(body).encode(), "application/problem+json", type(self).busy.pop())
            return
        self._answer(202, json.dumps(ACCEPTED).encode(), "application/json")

    def _events(self, after: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b": stream of events\n\n")
        if after == 0:  # cut off in the middle, with a keep-alive comment after an id
            self.wfile.write(_sse(1, "block.state", to="running") + b": keep-alive\n\n")
        else:
            self.wfile.write(_sse(2, "block.state", to="done") + _sse(2, "end"))

    def _note(self) -> None:
        type(self).seen.append((self.command, self.path, dict(self.headers)))

    def _answer(self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def service() -> Iterator[type[_Service]]:
    handler = type("Service", (_Service,), {"seen": [], "failures_left": 0, "busy": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        handler.url = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield handler
        server.shutdown()
        thread.join()


@pytest.fixture
def client(service: Any) -> Iterator[Client]:
    with Client(service.url, "a-token-for-tests") as made:
        yield made


def test_submit_repeats_with_the_same_key_when_the_connection_breaks(client: Client, service: type[_Service]) -> None:
    service.failures_left = 1
    answer = client.ablations.submit(SpecBody(content=b"ablation: x"))
    assert answer.id == "abl_1"
    keys = [headers["Idempotency-Key"] for _, _, headers in service.seen]
    assert len(keys) == 2
    assert len(set(keys)) == 1
    assert service.seen[0][2]["Authorization"] == "Bearer a-token-for-tests"


def test_submit_waits_for_a_busy_service_that_says_how_long(client: Client, service: type[_Service]) -> None:
    service.busy = [{"Retry-After": "0"}, {"Retry-After": "0"}]
    assert client.ablations.submit(SpecBody(content=b"ablation: x")).id == "abl_1"
    assert len({headers["Idempotency-Key"] for _, _, headers in service.seen}) == 1


@pytest.mark.parametrize(("busy", "calls"), [([{"Retry-After": "0"}] * 3, 3), ([{}], 1)])
def test_a_service_that_stays_busy_fails(
    client: Client, service: type[_Service], busy: list[dict[str, str]], calls: int
) -> None:
    service.busy = list(busy)
    with pytest.raises(ServiceFailed, match="Retry later"):
        client.ablations.submit(SpecBody(content=b"ablation: x"))
    assert len(service.seen) == calls


def test_submit_uses_a_fresh_key_for_every_submission(client: Client, service: type[_Service]) -> None:
    client.ablations.submit({"ablation": "x"})
    client.ablations.submit({"ablation": "x"})
    assert len({headers["Idempotency-Key"] for _, _, headers in service.seen}) == 2
    assert service.seen[0][2]["Content-Type"] == "application/json"


def test_watch_reconnects_after_the_last_event_and_ends(client: Client, service: type[_Service]) -> None:
    events = list(client.ablations.watch("abl_1"))
    assert [(event.seq, event.kind, event.went_to) for event in events] == [
        (1, "block.state", "running"),
        (2, "block.state", "done"),
        (2, "end", None),
    ]
    assert [headers["Last-Event-ID"] for _, _, headers in service.seen] == ["0", "1"]


def test_problem_document_becomes_refused(client: Client) -> None:
    with pytest.raises(Refused, match="not yet") as refusal:
        client.ablations.verdict("abl_1")
    assert refusal.value.problem.status == 409


def test_an_answer_that_is_not_ours_becomes_service_failed(client: Client) -> None:
    with pytest.raises(ServiceFailed, match="answered 502 without a problem document"):
        client.ablations.get("abl_1")


def test_log_returns_text_and_the_offset_where_it_ends(client: Client) -> None:
    assert client.trials.log("trl_1", offset=0) == ("größer", 8)


def test_nothing_listening_becomes_unreachable_with_what_to_do() -> None:
    with Client(nobody_url(), "token") as client, pytest.raises(Unreachable, match="ablate up"):
        client.nodes()


@pytest.mark.parametrize("content", [b"<html>welcome</html>", b"[]", b'{"ok": true}', b"", b"\xff"])
def test_another_program_that_answers_200_becomes_service_failed(content: bytes) -> None:
    transport = httpx.MockTransport(lambda _request: httpx.Response(200, content=content))
    with Client(nobody_url(), "token") as client:
        client._connection.http = httpx.Client(transport=transport, base_url=nobody_url())
        for call in (client.nodes, client.tokens.identity, lambda: client.ablations.get("abl_1"), client.tokens.list):
            with pytest.raises(ServiceFailed, match="no answer of this version of Ablate"):
                call()
        if content != b"[]":
            with pytest.raises(ServiceFailed):
                client.history("hybrid-tiny")
        with pytest.raises(ServiceFailed):
            list(client.ablations.list())
