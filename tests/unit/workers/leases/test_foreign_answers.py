"""Only the service's own answers count: what a proxy in between says loses no report, no lease and no worker."""

import gzip
import json
import logging
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from ablate.experiments.records.identity import BlockReport
from ablate.experiments.records.messages import ClaimRequest, Heartbeat
from ablate.workers.errors import ApiRefused, ApiUnreachable, StaleLease
from ablate.workers.leases.service_api import ServiceApi
from ablate.workers.leases.spool import Spool

TOKEN = "hZ3V5T8QW2R4Y6M9N0P1Sw"
ATTEMPT = "att_1"
REPORT = BlockReport(token=TOKEN, failure_class="timeout", message="it took too long")
HTML = {"Content-Type": "text/html"}
GZIP = {"Content-Encoding": "gzip"}
FOREIGN: dict[str, Callable[[], httpx.Response]] = {
    "page with 200": lambda: httpx.Response(200, headers=HTML, text="<html>sign in</html>"),
    "page with 404": lambda: httpx.Response(404, headers=HTML, text="<html>not here</html>"),
    "conflict of a proxy": lambda: httpx.Response(409, json={"error": "conflict"}),
    "refusal of a proxy": lambda: httpx.Response(403, json={"type": "about:blank", "title": "Forbidden"}),
    "redirect": lambda: httpx.Response(302, headers={"Location": "https://sign-in.example/"}),
    "status 521": lambda: httpx.Response(521, text="origin is down"),
    "nothing": lambda: httpx.Response(204),
    "other JSON": lambda: httpx.Response(200, json={"ok": True}),
    "JSON list": lambda: httpx.Response(200, json=[1]),
    "other attempt": lambda: httpx.Response(200, json={"attempt_id": "att_2", "block_id": "b", "block_state": "done"}),
    "broken gzip": lambda: httpx.Response(
        200, headers={"Content-Encoding": "gzip"}, stream=httpx.ByteStream(b"no gzip")
    ),
    "bomb of a page": lambda: httpx.Response(200, headers=HTML, content=gzip.compress(b"x" * 10_000)),
}


def api_with(answer: Callable[[httpx.Request], httpx.Response]) -> ServiceApi:
    api = ServiceApi("http://127.0.0.1:1", "key")
    api._http = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://127.0.0.1:1")
    return api


def own_problem(status: int, slug: str) -> httpx.Response:
    body = {"type": f"urn:ablate:problem:{slug}", "title": "no", "status": status, "detail": "why"}
    return httpx.Response(status, json=body, headers={"Content-Type": "application/problem+json"})


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    spool = Spool(tmp_path / "spool")
    spool.keep(ATTEMPT, REPORT)
    return spool


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_answer_keeps_the_report(name: str, spool: Spool) -> None:
    api = api_with(lambda _request: FOREIGN[name]())
    with pytest.raises(ApiUnreachable):
        spool.send_all(api.report)
    assert len(spool.waiting()) == 1


@pytest.mark.parametrize("name", [name for name in FOREIGN if name != "nothing"])
def test_foreign_answer_ends_no_claim_and_no_lease(name: str) -> None:
    api = api_with(lambda _request: FOREIGN[name]())
    with pytest.raises(ApiUnreachable):
        api.claim(ClaimRequest(node_id="nod_1"))
    with pytest.raises(ApiUnreachable):
        api.heartbeat(ATTEMPT, Heartbeat(token=TOKEN))
    if name not in ("other JSON", "other attempt"):
        with pytest.raises(ApiUnreachable):
            api.key_node()


def test_own_answers_end_the_report(spool: Spool, caplog: pytest.LogCaptureFixture) -> None:
    done = {"attempt_id": ATTEMPT, "block_id": "blk_1", "block_state": "done"}
    for answer in (own_problem(409, "stale-token"), own_problem(404, "not-found"), httpx.Response(200, json=done)):
        spool.keep(ATTEMPT, REPORT)
        with caplog.at_level(logging.WARNING):
            spool.send_all(api_with(lambda _request, answer=answer: answer).report)
        assert spool.waiting() == []


def test_own_problems_keep_their_meaning() -> None:
    with pytest.raises(StaleLease, match="why"):
        api_with(lambda _request: own_problem(409, "stale-token")).report(ATTEMPT, REPORT)
    with pytest.raises(ApiRefused, match="403: why"):
        api_with(lambda _request: own_problem(403, "forbidden")).report(ATTEMPT, REPORT)
    with pytest.raises(ApiUnreachable, match="why"):
        api_with(lambda _request: own_problem(503, "unavailable")).report(ATTEMPT, REPORT)


def test_sent_report_is_the_spooled_one(spool: Spool) -> None:
    bodies: list[dict[str, object]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json={"attempt_id": ATTEMPT})

    spool.send_all(api_with(answer).report)
    assert bodies == [json.loads(REPORT.model_dump_json())]
