"""Proxies that can be slow, silent, cut or stranded, and that lose, repeat or answer single requests."""

import asyncio
import contextlib
import re
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from tests.chaos.history import History

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter

_PIECE = 65_536
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)


_AnyProxy = TypeVar("_AnyProxy", bound="Proxy")


class Proxies:
    """The thread that runs all proxies of one system."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="proxies", daemon=True)

    def __enter__(self) -> "Proxies":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(_cancel_others(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def between(self, port: int) -> "Proxy":
        """Return a proxy in front of `port` of the loopback address."""
        return self._listening(Proxy(self.loop, [port]))

    def balancer(self, ports: Sequence[int], history: History) -> "HttpProxy":
        """Return a proxy in front of several API processes, which records what they answer."""
        return self._listening(HttpProxy(self.loop, ports, history))

    def _listening(self, made: "_AnyProxy") -> "_AnyProxy":
        asyncio.run_coroutine_threadsafe(made.listen(), self.loop).result(10)
        return made


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Proxy:
    """Carries bytes both ways. Its faults can be set from any thread and last until they are removed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, targets: Sequence[int]) -> None:
        self.port = 0
        self._loop, self._targets = loop, deque(targets)
        self._open: set[Writer] = set()
        self._stranded: set[Writer] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._delay_s = 0.0
        self._is_cut = False

    async def listen(self) -> None:
        """Start to accept connections."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]

    @contextmanager
    def slow(self, delay_s: float) -> Iterator[None]:
        """Delay all data by `delay_s`."""
        self._delay_s = delay_s
        yield
        self._delay_s = 0.0

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Accept connections and carry nothing, like a network that drops packets."""
        self._loop.call_soon_threadsafe(self._flowing.clear)
        yield
        self._loop.call_soon_threadsafe(self._flowing.set)

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Break every connection and refuse new ones."""
        self._is_cut = True
        self._loop.call_soon_threadsafe(self._break_all)
        yield
        self._is_cut = False

    def strand(self) -> None:
        """Let no open connection carry anything from now on, as a firewall that forgot them; new ones work."""
        self._loop.call_soon_threadsafe(lambda: self._stranded.update(self._open))

    def end_stranded(self) -> None:
        """Break the stranded connections."""
        self._loop.call_soon_threadsafe(self._break_all, self._stranded)

    def _break_all(self, writers: set[Writer] | None = None) -> None:
        for writer in [*(self._open if writers is None else writers)]:
            writer.transport.abort()
        if writers is not None:
            writers.clear()

    async def _accept(self, reader: Reader, writer: Writer) -> None:
        ends = (OSError, asyncio.IncompleteReadError, asyncio.CancelledError)  # the last one at the end of all proxies
        with contextlib.suppress(*ends):
            async with self._tracked(writer):
                if not self._is_cut:
                    await self._serve(reader, writer)

    @asynccontextmanager
    async def _tracked(self, writer: Writer) -> AsyncIterator[None]:
        self._open.add(writer)
        try:
            yield
        finally:
            self._open.discard(writer)
            self._stranded.discard(writer)
            writer.close()

    @asynccontextmanager
    async def _upstream(self) -> AsyncIterator[tuple[Reader, Writer]]:
        reader, writer = await self._connected()
        async with self._tracked(writer):
            yield reader, writer

    async def _connected(self) -> tuple[Reader, Writer]:
        """Connect to the next target that accepts. Raises OSError."""
        for last in reversed(range(len(self._targets))):
            self._targets.rotate()
            try:
                return await asyncio.open_connection("127.0.0.1", self._targets[0])
            except OSError:
                if not last:
                    raise
        raise OSError("there is no target")

    async def _serve(self, reader: Reader, writer: Writer) -> None:
        async with self._upstream() as (answers, requests):
            both = [asyncio.create_task(self._pump(*pair)) for pair in ((reader, requests), (answers, writer))]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _pump(self, source: Reader, sink: Writer) -> None:
        while data := await source.read(_PIECE):
            await self._pass(data, sink)

    async def _pass(self, data: bytes, sink: Writer) -> None:
        await asyncio.sleep(self._delay_s)
        await self._flowing.wait()
        if sink in self._stranded:
            await sink.wait_closed()
            raise ConnectionResetError
        sink.write(data)
        await sink.drain()


_PAGE = b"<!doctype html><title>Portal</title><p>Please sign in to the network."
_HTML = b"Content-Type: text/html"
_JSON = b"Content-Type: application/json"
FORGED: dict[str, tuple[bytes, tuple[bytes, ...], bytes]] = {
    "html": (b"200 OK", (_HTML,), _PAGE),
    "empty": (b"200 OK", (_JSON,), b"{}"),
    "gzip": (b"200 OK", (_JSON, b"Content-Encoding: gzip"), b"\x1f\x8b\x08\x00 not gzip"),
    "204": (b"204 No Content", (), b""),
    "302": (b"302 Found", (_HTML, b"Location: http://127.0.0.1:9/portal"), b""),
    "401": (b"401 Unauthorized", (_HTML,), _PAGE),
    "404": (b"404 Not Found", (_HTML,), _PAGE),
    "409": (b"409 Conflict", (_JSON,), b'{"error": "conflict"}'),
    "521": (b"521 Web Server Is Down", (_HTML,), _PAGE),
}
"""Answers of a proxy that is not the service: status, headers and body."""


@dataclass
class Trick:
    """A fault for the next request whose path ends with `verb`."""

    verb: str
    kind: str
    """lose_request, lose_answer, double, late, replay or forge."""
    wait_s: float = 0.0
    """For late and replay: the delay after the request."""
    forged: str = ""
    """For forge: the answer."""
    delivers: bool = True
    """For forge: whether the service gets the request."""
    played: bool = False


class HttpProxy(Proxy):
    """A proxy that can lose, repeat, delay and answer single requests."""

    def __init__(self, loop: asyncio.AbstractEventLoop, targets: Sequence[int], history: History) -> None:
        super().__init__(loop, targets)
        self.tricks: list[Trick] = []
        self._history = history
        self._tricks: dict[str, Callable[[bytes, Writer, Any], Awaitable[bool]]] = {
            "lose_request": self._lose_request,
            "lose_answer": self._lose_answer,
            "double": self._double,
            "late": self._late,
            "replay": self._replay,
            "forge": self._forge,
        }

    async def _serve(self, reader: Reader, writer: Writer) -> None:
        while request := await _message(reader):
            trick = self._take(request)
            play = self._carry if trick is None else self._tricks[trick.kind]
            if not await play(request, writer, trick):
                return

    def _take(self, request: bytes) -> Trick | None:
        path = request.split(b" ", 2)[1].decode()
        for trick in self.tricks:
            if not trick.played and path.endswith(trick.verb):
                trick.played = True
                return trick
        return None

    async def _send(self, request: bytes) -> bytes:
        """Send a request over a new connection, even if its sender is gone; return b"" if nobody answers."""
        answer = b""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            async with self._upstream() as (answers, requests):
                await self._pass(request, requests)
                answer = await _message(answers)
        self._history.note(request, answer)
        return answer

    async def _carry(self, request: bytes, writer: Writer, _trick: Trick | None) -> bool:
        answer = await self._send(request)
        await self._pass(answer, writer)
        return bool(answer)

    async def _lose_request(self, _request: bytes, _writer: Writer, _trick: Trick) -> bool:
        return False

    async def _lose_answer(self, request: bytes, _writer: Writer, _trick: Trick) -> bool:
        await self._send(request)
        return False

    async def _double(self, request: bytes, writer: Writer, _trick: Trick) -> bool:
        """Send it twice at the same time and return the second answer."""
        _first, second = await asyncio.gather(self._send(request), self._send(request))
        await self._pass(second, writer)
        return bool(second)

    async def _late(self, request: bytes, _writer: Writer, trick: Trick) -> bool:
        """Break the connection at once and deliver the request later."""
        _keep(asyncio.create_task(self._send_later(request, trick.wait_s)))
        return False

    async def _replay(self, request: bytes, writer: Writer, trick: Trick) -> bool:
        """Deliver the request now, and once more later."""
        _keep(asyncio.create_task(self._send_later(request, trick.wait_s)))
        return await self._carry(request, writer, trick)

    async def _forge(self, request: bytes, writer: Writer, trick: Trick) -> bool:
        """Answer in place of the service."""
        if trick.delivers:
            await self._send(request)
        status, headers, body = FORGED[trick.forged]
        lines = (b"HTTP/1.1 " + status, *headers, b"Content-Length: %d" % len(body))
        await self._pass(b"\r\n".join(lines) + b"\r\n\r\n" + body, writer)
        return True

    async def _send_later(self, request: bytes, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        await self._send(request)


_running: set["asyncio.Task[None]"] = set()


def _keep(task: "asyncio.Task[None]") -> None:
    """Keep a reference to a task until it ends, because the loop keeps none."""
    _running.add(task)
    task.add_done_callback(_running.discard)


async def _message(reader: Reader) -> bytes:
    """Read one HTTP message with its body; b"" at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""
    length = _LENGTH.search(head)
    return head + (await reader.readexactly(int(length[1])) if length else b"")
