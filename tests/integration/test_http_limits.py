"""What strangers and slow or broken clients can do to a real server: bodies, heads, silence, and going away."""

import json
import random
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.api_stack import ADMIN, WORKER, Api, api_fixture, served_api
from tests.bundles import archive_of
from tests.factories import spec_values
from tests.waiting import LIMIT_S, until

MIB = 2**20
SMALL_REPORTS = 65_536


api = api_fixture(served_api, kinds=["sqlite"], scope="module", max_report_bytes=SMALL_REPORTS, max_body_bytes=16_384)


def _connect(api: Api) -> socket.socket:
    return socket.create_connection(("127.0.0.1", api.client.base_url.port or 0), timeout=LIMIT_S)


def _head(path: str, token: str | None = None, *, method: str = "POST", **headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x"]
    lines += [f"Authorization: Bearer {token}"] if token else []
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def _answer(connection: socket.socket) -> tuple[int, bytes]:
    """The status and everything up to the end of the connection."""
    data = b""
    try:
        while piece := connection.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return (int(data.split(b" ", 2)[1]) if data else 0), data


BODIES = [
    ("/v1/ablations:import", None, 401),
    ("/v1/ablations:import", "nobody", 401),
    ("/v1/ablations:import", WORKER, 413),
    ("/v1/attempts/att_01KAHZ3V5T8QW2R4Y6M9N0P1S5:report", None, 401),
    ("/v1/attempts/att_01KAHZ3V5T8QW2R4Y6M9N0P1S5:report", ADMIN, 413),
    ("/v1/ablations", None, 401),
    ("/v1/nowhere", None, 401),
    ("/v1/ablations:import", ADMIN, 413),
]


@pytest.mark.parametrize(("path", "token", "status"), BODIES)
@pytest.mark.parametrize("chunked", [False, True], ids=["declared", "chunked"])
def test_a_body_that_nobody_may_send_is_refused_before_it_is_read(
    api: Api, path: str, token: str | None, status: int, chunked: bool
) -> None:
    """Not one byte of the declared body is sent; of a chunked one, no more than its sender may send."""
    kind = "application/x-tar" if path.endswith("import") else "application/json"
    length = {"Transfer_Encoding": "chunked"} if chunked else {"Content_Length": str(60 * MIB)}
    headers = {"Content_Type": kind, **length}
    with _connect(api) as connection:
        connection.sendall(_head(path, token, **headers))
        if chunked and status == 413:
            piece = b"%x\r\n%b\r\n" % (8192, b" " * 8192)
            connection.sendall(piece * (SMALL_REPORTS // 8192 + 1))
        code, output = _answer(connection)
    assert (code, b"connection: close" in output.lower()) == (status, True), output


def test_the_large_limit_is_for_those_who_may_send_such_bodies(api: Api) -> None:
    """An import of 60,000 bytes by an operator is read and verified; one by a worker is not read."""
    body = archive_of({"manifest.json": b"y" * 50_000})
    headers = {"Content-Type": "application/x-tar"}
    judged = api.client.post("/v1/ablations:import", content=body, headers={**api.admin, **headers})
    assert (judged.status_code, judged.json()["errors"][0]["pointer"]) == (422, "archive:bundle-1/manifest.json")
    assert api.client.post("/v1/ablations:import", content=body, headers={**api.worker, **headers}).status_code == 413


@pytest.mark.parametrize("seed", range(8))
def test_an_honest_body_in_pieces_of_any_size_is_taken(api: Api, seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - draws that repeat
    body = json.dumps(spec_values(ablation=f"pieces-{seed}")).encode()
    pieces, rest = [], body
    while rest:
        size = draw.choice([1, 1, 2, 7, 300])
        pieces.append(rest[:size])
        rest = rest[size:]
    head = _head(
        "/v1/ablations", ADMIN, Content_Type="application/json", Transfer_Encoding="chunked", Idempotency_Key=f"p{seed}"
    )
    with _connect(api) as connection:
        connection.sendall(head)
        for piece in pieces:
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        connection.sendall(b"0\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 202")


def test_many_requests_sent_at_once_are_all_answered(api: Api) -> None:
    """Pipelined: far more bytes than one head may have, and no head is too large."""
    count = 3000
    with _connect(api) as connection:
        sender = threading.Thread(
            target=connection.sendall, args=(_head("/healthz", method="GET", X_Filler="a" * 60) * count,)
        )
        sender.start()
        received = b""
        while received.count(b"HTTP/1.1 200") < count:
            piece = connection.recv(65536)
            assert piece
            received += piece
        sender.join()


def test_bodies_that_are_read_at_once_stay_within_a_budget(api: Api) -> None:
    """Four imports that stop before their end hold all that is allowed; a fifth waits until one of them is gone."""
    head = _head("/v1/ablations:import", ADMIN, Content_Type="application/x-tar", Content_Length=str(SMALL_REPORTS - 1))
    held = [_connect(api) for _ in range(4)]
    for connection in held:
        connection.sendall(head + b" " * (SMALL_REPORTS - 2))
    headers = {**api.admin, "Content-Type": "application/x-tar"}

    def answer() -> httpx.Response:
        return api.client.post("/v1/ablations:import", content=b" " * 8000, headers=headers)

    until(lambda: answer().status_code == 503)
    refused = answer()
    assert refused.json()["type"].endswith("unavailable")
    assert refused.headers["retry-after"] == "2"
    held.pop().close()
    until(lambda: answer().status_code == 422)  # read and judged
    for connection in held:
        connection.close()


def test_bodies_of_strangers_delay_nobody_with_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers who stop before the end of their forms shut out only each other."""
    monkeypatch.setattr("ablate.service.http.middleware._FORMS_AT_ONCE", 1)
    form = _head("/sign-in", Content_Type="application/x-www-form-urlencoded", Content_Length="16001") + b" " * 16_000
    with served_api("sqlite", tmp_path) as running:
        strangers = [_connect(running) for _ in range(4)]
        for connection in strangers:
            connection.sendall(form)

        def sign_in(size: int = 8000) -> int:
            return running.client.post("/sign-in", data={"link": "x" * size}).status_code

        until(lambda: sign_in() == 503)
        assert running.claim(running.register()) is None
        assert running.submit()["state"] == "queued"
        for connection in strangers:
            connection.close()
        until(lambda: sign_in() == 401)
        assert sign_in(70_000) == 413


def test_a_client_that_goes_away_is_no_error(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    draw = random.Random(7)  # noqa: S311 - draws that repeat
    paths = ["/v1/ablations", "/v1/ablations:plan", "/v1/blocks:claim", "/v1/ablations:import"]
    for number in range(40):
        path = draw.choice(paths)
        token = WORKER if "claim" in path else ADMIN
        head = _head(
            path, token, Content_Type="application/json", Content_Length="9000", Idempotency_Key=f"left-{number}"
        )
        with _connect(api) as connection:
            connection.sendall(head + b"{" * draw.randrange(0, 5000))
            if draw.random() < 0.5:
                time.sleep(draw.random() / 50)

    def left() -> list[str]:
        return [r.getMessage() for r in caplog.records if "went away" in r.getMessage()]

    until(lambda: len(left()) >= 20)
    assert [r.getMessage() for r in caplog.records if r.levelname in ("ERROR", "CRITICAL")] == []
    assert 'status="499"' in api.client.get("/metrics").text
