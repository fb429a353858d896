"""`ablate admin keys`: the node keys that the service trusts."""

from typing import Annotated

import typer
from rich.markup import escape

from ablate.experiments.reporting import wording
from ablate.experiments.reporting.terminal.terminal_table import TerminalTable, names, texts
from ablate.service.cli import completion
from ablate.service.cli.arguments import ReasonOption
from ablate.service.cli.output import JsonOption, guarded, out, print_json
from ablate.service.client.api import Client
from ablate.service.schemas.nodes import KeyList

app = typer.Typer(name="keys", help="Keys that nodes sign their blocks with.", no_args_is_help=True)

KeyArgument = Annotated[
    str, typer.Argument(metavar="KEY", help="A public key (ed25519:...).", autocompletion=completion.keys)
]


@app.command("list")
@guarded
def list_(as_json: JsonOption = False) -> None:
    """List all keys, with their nodes and the people who trusted them."""
    with Client() as client:
        _print(client.keys.list(), as_json=as_json)


@app.command()
@guarded
def trust(
    key: KeyArgument,
    node: Annotated[str, typer.Option(help="Name of the node with this key.")],
    as_json: JsonOption = False,
) -> None:
    """Trust a key for a node, in place of its former key. First compare it with `ablate worker key` on the node."""
    with Client() as client:
        _print(client.keys.trust(key, node=node), as_json=as_json)


@app.command()
@guarded
def revoke(
    key: KeyArgument,
    reason: ReasonOption,
    as_json: JsonOption = False,
) -> None:
    """Accept nothing more that a key signs. Earlier imports stay, and their verdicts name the key."""
    with Client() as client:
        _print(client.keys.revoke(key, reason=reason), as_json=as_json)


def _print(keys: KeyList, *, as_json: bool) -> None:
    if as_json:
        print_json(keys)
        return
    table = TerminalTable(*names("node", "key"), *texts("trusted", "revoked"), title="keys")
    for row in keys.items:
        revoked = "" if row.revoked_at is None else f"{wording.moment(row.revoked_at)}: {row.reason}"
        table.add_row(
            escape(row.node), row.key, escape(f"{wording.moment(row.trusted_at)} by {row.trusted_by}"), escape(revoked)
        )
    out().print(table)
