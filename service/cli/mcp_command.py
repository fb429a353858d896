"""`ablate mcp`: the tools of agents, over standard input and output or over HTTP."""

import signal
import socket
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from ablate.service.cli.output import err, guarded

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

if find_spec("mcp") is None:  # imported when it runs: it takes half a second
    raise ModuleNotFoundError(name="mcp")

app = typer.Typer()

_WAITERS = 400
"""Calls that wait at the same time, each in a thread."""
_GRACE_S = 3
"""For open calls after Ctrl-C."""


@app.command()
@guarded
def mcp(
    http: Annotated[
        bool, typer.Option("--http", help="Serve many agents over HTTP, each with the token that it sends.")
    ] = False,
    host: Annotated[str, typer.Option(help="With --http: the address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --http: the port.")] = 8177,
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST[:PORT]", help="With --http: another name of this server in requests; repeatable."),
    ] = None,
) -> None:
    """Serve agents by the Model Context Protocol: plan, ask, try, verdicts, sessions.

    Without --http the agent's program starts this command. It uses ABLATE_URL and ABLATE_TOKEN, or the stack that runs
    here. With --http the server has no rights of its own; put TLS in front of it outside of this machine.
    """
    import anyio

    from ablate.service.cli.mcp_tools import make_server

    listener = None
    if http:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a thread that reads standard input would hold up Ctrl-C
    anyio.run(_serve, make_server(), listener, tuple(name or ()))


async def _serve(server: "MCPServer[None]", listener: socket.socket | None, names: tuple[str, ...]) -> None:
    """Serve over HTTP if there is a listener, otherwise over standard input and output."""
    from anyio import to_thread

    to_thread.current_default_thread_limiter().total_tokens = _WAITERS
    if listener is None:
        await server.run_stdio_async()
        return
    import uvicorn
    from mcp.server.transport_security import TransportSecuritySettings

    hosts = ["127.0.0.1:*", "localhost:*", "[::1]:*", *names]
    origins = [f"{scheme}://{one}" for one in hosts for scheme in ("http", "https")]
    security = TransportSecuritySettings(allowed_hosts=hosts, allowed_origins=origins)
    application = server.streamable_http_app(stateless_http=True, transport_security=security)
    config = uvicorn.Config(application, log_level="warning", timeout_graceful_shutdown=_GRACE_S)
    address, port = listener.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    err().print(f"agents connect to http://{shown}:{port}/mcp; Ctrl-C ends it")
    await uvicorn.Server(config).serve(sockets=[listener])
