"""`ablate nodes`: the machines that run trials, and the key that each of them has."""

from typing import Annotated, ClassVar

import typer
from rich.markup import escape

from experiments.runtime.program import ManyCommands
from service.cli import completion, node_states, show
from service.cli.names import NodeArgument
from service.cli.output import JsonOption, err, guarded, out, print_json
from service.cli.secret_output import S_PER_HOUR, GraceOption, ReasonOption, print_secret
from service.client.api import Client

_NOT_REMOVED = (
    "A node stays listed, because receipts name it. To take it down: ablate nodes drain NODE, stop its worker when its "
    "block is done, then ablate nodes revoke-key NODE --reason ..."
)


class _Nodes(ManyCommands):
    meant: ClassVar = dict.fromkeys(("remove", "delete", "rm"), _NOT_REMOVED)


app = typer.Typer(name="nodes", help="Machines that run trials.", invoke_without_command=True, cls=_Nodes)
app.add_typer(node_states.app)


@app.callback()
@guarded
def nodes(context: typer.Context, as_json: JsonOption = False) -> None:
    """Show the machines that run trials, what is known of their noise, and the rate of false words."""
    if context.invoked_subcommand is not None:
        return
    with Client() as client:
        rows, noise = client.nodes(), client.calibrations()
    if as_json:
        print_json(rows)
    else:
        out().print(show.nodes(rows))
        out().print(show.calibrations(noise))


@app.command()
@guarded
def add(
    node: NodeArgument,
    node_class: Annotated[
        str | None,
        typer.Option(
            "--class",
            help="The only node class that it may have; default: any.",
            autocompletion=completion.node_classes,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Issue the key of a node and print it, once. A worker with it speaks for this node and does nothing else."""
    with Client() as client:
        found = client.node_keys.add(node, node_class=node_class)
    if node_class is None:
        err().print(f"no --class was given: a worker with this key may register {escape(node)} as any node class")
    print_secret(found, as_json=as_json)


@app.command("rotate-key")
@guarded
def rotate_key(node: NodeArgument, grace_hours: GraceOption = 24.0, as_json: JsonOption = False) -> None:
    """Replace the key of a node; the one before it counts a while longer, until the worker was started with the new."""
    with Client() as client:
        found = client.node_keys.rotate(node, grace_s=grace_hours * S_PER_HOUR)
    print_secret(found, as_json=as_json)


@app.command("end-old-keys")
@guarded
def end_old_keys(node: NodeArgument) -> None:
    """End the keys of a node that were replaced, before their grace is over."""
    with Client() as client:
        client.node_keys.end_old(node)
    out().print(f"only the newest key of {escape(node)} counts")


@app.command("revoke-key")
@guarded
def revoke_key(node: NodeArgument, reason: ReasonOption) -> None:
    """End every key of a node; its block goes back when the lease runs out. It may be added again."""
    with Client() as client:
        client.node_keys.revoke(node, reason=reason)
    out().print(f"the key of {escape(node)} is revoked; other API processes know within 10 s")
