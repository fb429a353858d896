"""Many open streams: each gets every event, and requests beside them do not wait."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.api_stack import ADMIN, served_api
from tests.waiting import LIMIT_S, until

STREAMS = 200


class _Follower:
    """One stream on a raw connection, which a client library would make ten times as dear."""

    def __init__(self, port: int, path: str, after: int) -> None:
        self._port, self._path, self._after = port, path, after
        self.data = b""

    async def follow(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = f"GET {self._path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ADMIN}\r\nLast-Event-ID: {self._after}"
        writer.write(f"{head}\r\n\r\n".encode())
        while b"event: end" not in self.data:
            piece = await reader.read(65536)
            if not piece:
                break
            self.data += piece
        writer.close()


@pytest.fixture
def followers() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.slow
def test_many_streams_hear_everything_and_delay_nobody(tmp_path: Path, followers: asyncio.AbstractEventLoop) -> None:
    with served_api("sqlite", tmp_path) as api:
        made = [api.submit(ablation=f"followed-{number}") for number in range(20)]
        port = api.client.base_url.port or 0
        streams = [_Follower(port, made[number % 20]["links"]["events"], 0) for number in range(STREAMS)]
        running = [asyncio.run_coroutine_threadsafe(one.follow(), followers) for one in streams]
        until(lambda: all(b"submitted" in one.data for one in streams), what="the first events")
        assert [api.get("/v1/ablations?limit=5").status_code for _ in range(20)] == [200] * 20
        threads = threading.active_count()
        for one in made:
            api.cancel(one["id"])
        for one in running:
            one.result(timeout=LIMIT_S)
    assert all(one.data.count(b"event: end\r\n") + one.data.count(b"event: end\n") == 1 for one in streams)
    assert all(b'"to":"cancelled"' in one.data for one in streams)
    assert threads < 60


def test_one_token_cannot_take_the_streams_of_the_others(tmp_path: Path) -> None:
    with served_api("sqlite", tmp_path, max_streams=8, max_token_streams=3) as api, ExitStack() as streams:
        path, reader = api.submit()["links"]["events"], api.token("reader", "read")
        pieces: list[Iterator[bytes]] = []

        def status_of(token: dict[str, str]) -> int:
            stream = streams.enter_context(api.client.stream("GET", path, headers=token))
            pieces.append(stream.iter_raw())  # kept: a generator that goes closes its stream
            next(pieces[-1])
            return int(stream.status_code)

        assert [status_of(reader) for _ in range(5)] == [200, 200, 200, 429, 429]
        refused = api.get(path, headers=reader)
        assert (refused.headers["retry-after"], "3 open streams" in refused.text) == ("5", True)
        assert status_of(api.admin) == 200
        streams.close()
        until(lambda: status_of(reader) == 200, what="a stream after the others ended")


def test_more_streams_than_allowed_are_refused_until_one_ends(tmp_path: Path) -> None:
    with served_api("sqlite", tmp_path, max_streams=3) as api:
        path = api.submit()["links"]["events"]
        held = [api.client.stream("GET", path, headers=api.admin) for _ in range(3)]
        lines = [one.__enter__().iter_lines() for one in held]  # kept: a generator that goes closes its stream
        assert all("event: ablation.state" in one for one in lines)
        refused = api.get(path)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "5"
        assert "3 streams are open" in refused.json()["detail"]
        lines.pop().close()
        held.pop().__exit__(None, None, None)

        def is_open() -> bool:
            with api.client.stream("GET", path, headers=api.admin) as stream:
                return stream.status_code == 200

        until(is_open, what="a place for another stream")
        for one in held:
            one.__exit__(None, None, None)
