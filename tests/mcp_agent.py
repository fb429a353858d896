"""An agent: the official SDK's client of `ablate mcp`, over standard input and output or over HTTP."""

import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
from anyio.from_thread import BlockingPortal, start_blocking_portal
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp_types import TextContent

from tests.cli import PROGRAM
from tests.waiting import LIMIT_S


class Answer(NamedTuple):
    """The result of a tool."""

    is_error: bool
    text: str
    values: Any
    progress: list[str]


class Agent:
    """Calls of an agent that is connected."""

    def __init__(self, portal: BlockingPortal, client: Client) -> None:
        self._portal = portal
        self.client = client

    def call(self, tool: str, **arguments: Any) -> Answer:
        progress: list[tuple[float, str]] = []

        async def called() -> Any:
            async def tell(done: float, _total: float | None, message: str | None) -> None:
                progress.append((done, message or ""))

            return await self.client.call_tool(tool, arguments, progress_callback=tell)

        result = self._portal.call(called)
        assert [done for done, _ in progress] == sorted({done for done, _ in progress}), "progress grows"
        text = "\n".join(part.text for part in result.content if isinstance(part, TextContent))
        return Answer(result.is_error, text, result.structured_content, [message for _, message in progress])

    def leave_during(self, tool: str, **arguments: Any) -> str:
        """Call a tool, break the call off after its first progress message, and return that message."""

        async def first() -> str:
            import anyio

            message = ""
            with anyio.CancelScope() as scope:

                async def tell(_done: float, _total: float | None, text: str | None) -> None:
                    nonlocal message
                    message = text or ""
                    scope.cancel()

                await self.client.call_tool(tool, arguments, progress_callback=tell)
            return message

        return str(self._portal.call(first))

    def tools(self) -> dict[str, Any]:
        return {tool.name: tool for tool in self._portal.call(self.client.list_tools).tools}

    def read(self, uri: str) -> str:
        (content,) = self._portal.call(self.client.read_resource, uri).contents
        return str(content.text)


@contextmanager
def over_stdio(environment: Mapping[str, str], folder: Path, mode: str = "auto") -> Iterator[Agent]:
    """Start `ablate mcp` in a folder, as an agent does; `mode` is how the SDK agrees about the version."""
    command = StdioServerParameters(command=str(PROGRAM), args=["mcp"], env=dict(environment), cwd=folder)
    with ExitStack() as stack:
        yield _connected(stack, command, mode)


@contextmanager
def over_http(url: str, token: str | None, mode: str = "auto") -> Iterator[Agent]:
    """Connect to `ablate mcp --http` with a token."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    http = httpx2.AsyncClient(headers=headers, timeout=LIMIT_S, trust_env=False)
    with ExitStack() as stack:
        yield _connected(stack, streamable_http_client(url, http_client=http), mode, http)


def _connected(stack: ExitStack, server: Any, mode: str, *resources: Any) -> Agent:
    portal = stack.enter_context(start_blocking_portal())
    client = Client(server, mode=mode, read_timeout_seconds=LIMIT_S)
    for resource in (*resources, client):
        stack.enter_context(portal.wrap_async_context_manager(resource))
    return Agent(portal, client)


@contextmanager
def serving(environment: Mapping[str, str], *options: str) -> Iterator[str]:
    """Start `ablate mcp --http` on a free port; yield its address."""
    with ExitStack() as stack:
        command = ["env", "--default-signal=INT", str(PROGRAM), "mcp", "--http", "--port", "0", *options]
        process = stack.enter_context(
            subprocess.Popen(command, env=dict(environment), stderr=subprocess.PIPE, text=True)
        )
        stack.callback(process.send_signal, signal.SIGINT)
        assert process.stderr is not None
        address = re.search(r"http://\S+/mcp", process.stderr.readline())
        assert address is not None, process.stderr.read()
        yield address[0]
