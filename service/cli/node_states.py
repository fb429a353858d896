"""`ablate nodes drain|quarantine|resume`: operators stop nodes and let them go on."""

from typing import Annotated

import typer

from service.cli import show
from service.cli.names import RegisteredNodeArgument, node_name
from service.cli.output import JsonOption, guarded, out, print_json
from service.client.api import Client
from service.schemas.nodes import NodePublic

app = typer.Typer()


@app.command()
@guarded
def drain(node: RegisteredNodeArgument, as_json: JsonOption = False) -> None:
    """Let a node finish the block that it runs, and give it no other."""
    with Client() as client:
        _show(client.node_states.drain(node_name(client, node)), as_json=as_json)


@app.command()
@guarded
def quarantine(
    node: RegisteredNodeArgument,
    reason: Annotated[str, typer.Option(help="Why; people will read it.")],
    as_json: JsonOption = False,
) -> None:
    """Give a node nothing more until it is resumed; what it runs goes on."""
    with Client() as client:
        _show(client.node_states.quarantine(node_name(client, node), reason=reason), as_json=as_json)


@app.command()
@guarded
def resume(node: RegisteredNodeArgument, as_json: JsonOption = False) -> None:
    """Give a drained or quarantined node work again. What broke on it until now does not count any more."""
    with Client() as client:
        _show(client.node_states.resume(node_name(client, node)), as_json=as_json)


def _show(rows: list[NodePublic], *, as_json: bool) -> None:
    print_json(rows) if as_json else out().print(show.nodes(rows))
