"""`ablate nodes`: the machines that run trials, their states and their keys."""

from pathlib import Path
from typing import Annotated, ClassVar

import typer
from rich.markup import escape

from ablate.experiments.reporting.wording import counted
from ablate.experiments.system.console import CommandGroup
from ablate.service.cli import completion, tables
from ablate.service.cli.arguments import (
    ClassArgument,
    GraceOption,
    NodeArgument,
    ReasonOption,
    RegisteredNodeArgument,
    duration,
    node_name,
)
from ablate.service.cli.output import JsonOption, err, guarded, out, print_json, print_secret
from ablate.service.client.api import Client
from ablate.service.principals import Scope
from ablate.service.schemas.nodes import NodePublic
from ablate.service.schemas.tokens import MAX_USES

NewClassOption = Annotated[
    bool, typer.Option("--new-class", help="The class is right: no machine has it yet, and its name is like another's.")
]
_NOT_REMOVED = (
    "A node stays listed, because receipts name it. To take it down: ablate nodes drain NODE, stop its worker when its "
    "block is done, then ablate nodes revoke-key NODE --reason ..."
)


class _Nodes(CommandGroup):
    advice: ClassVar = dict.fromkeys(("remove", "delete", "rm"), _NOT_REMOVED)


app = typer.Typer(name="nodes", help="Machines that run trials.", invoke_without_command=True, cls=_Nodes)


@app.callback()
@guarded
def nodes(context: typer.Context, as_json: JsonOption = False) -> None:
    """Show the machines that run trials, their measured noise, and the rate of false verdicts."""
    if context.invoked_subcommand is not None:
        return
    with Client() as client:
        rows, noise, waiting = client.nodes(), client.calibrations(), client.waiting()
    if as_json:
        print_json(rows)
    else:
        out().print(tables.nodes(rows))
        out().print(tables.waiting(waiting))
        out().print(tables.calibrations(noise))


@app.command()
@guarded
def drain(node: RegisteredNodeArgument, as_json: JsonOption = False) -> None:
    """Let a node finish its block and give it no other."""
    with Client() as client:
        _print(client.node_states.drain(node_name(client, node)), as_json=as_json)


@app.command()
@guarded
def quarantine(node: RegisteredNodeArgument, reason: ReasonOption, as_json: JsonOption = False) -> None:
    """Give a node no more blocks until it is resumed. Its current block goes on."""
    with Client() as client:
        _print(client.node_states.quarantine(node_name(client, node), reason=reason), as_json=as_json)


@app.command()
@guarded
def resume(node: RegisteredNodeArgument, as_json: JsonOption = False) -> None:
    """Give a drained or quarantined node blocks again. Its earlier failures no longer count."""
    with Client() as client:
        _print(client.node_states.resume(node_name(client, node)), as_json=as_json)


@app.command()
@guarded
def add(
    node: NodeArgument,
    node_class: Annotated[
        str | None,
        typer.Option(
            "--class",
            help="The only node class that it may register as. Default: any.",
            autocompletion=completion.node_classes,
        ),
    ] = None,
    new_class: NewClassOption = False,
    as_json: JsonOption = False,
) -> None:
    """Issue the key of a node and print it once. A worker with this key can only act as this node."""
    with Client() as client:
        secret = client.node_keys.add(node, node_class=node_class, new_class=new_class)
    if node_class is None:
        err().print(f"no --class: a worker with this key may register {escape(node)} as any node class")
    print_secret(secret, as_json=as_json)


@app.command()
@guarded
def enrol(
    node_class: ClassArgument,
    uses: Annotated[int, typer.Option(min=1, max=MAX_USES, help="Workers that may enrol with it.")] = 1,
    lasts: Annotated[str, typer.Option("--for", metavar="DURATION", help="When it expires, such as 12h or 7d.")] = "1d",
    new_class: NewClassOption = False,
    as_json: JsonOption = False,
) -> None:
    """Create a token with which workers of a class, that a cluster starts, make nodes of themselves. Print it once."""
    with Client() as client:
        lasts_s = float(duration(lasts, "--for"))
        made = client.node_keys.enrol(node_class, uses=uses, lasts_s=lasts_s, new_class=new_class)
    if as_json:
        print_json(made)
        return
    err().print(
        f"enrolment token [bold]{escape(made.name)}[/] for {counted(uses, 'worker')}, shown only once; "
        "set it on the workers as ABLATE_ENROLMENT_TOKEN:"
    )
    typer.echo(made.secret)


@app.command("enrolments")
@guarded
def list_enrolments(as_json: JsonOption = False) -> None:
    """List the enrolment tokens, with the uses that are left. The service keeps no secrets."""
    with Client() as client:
        rows = [row for row in client.tokens.list().items if row.scope is Scope.ENROL]
    print_json(rows) if as_json else out().print(tables.enrolments(rows))


@app.command("revoke-enrolment")
@guarded
def revoke_enrolment(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `ablate nodes enrolments` lists it.")],
    reason: ReasonOption,
) -> None:
    """End an enrolment token. Nodes that enrolled with it stay."""
    with Client() as client:
        client.node_keys.revoke_enrolment(name, reason=reason)
    out().print(f"{escape(name)} is revoked; other API processes learn of it within 10 s")


@app.command("rotate-key")
@guarded
def rotate_key(node: NodeArgument, grace_hours: GraceOption = 24.0, as_json: JsonOption = False) -> None:
    """Replace the key of a node. The old key stays valid for a while, so that you can restart the worker."""
    with Client() as client:
        secret = client.node_keys.rotate(node, grace_s=grace_hours * 3600)
    print_secret(secret, as_json=as_json)


@app.command("end-old-keys")
@guarded
def end_old_keys(node: NodeArgument) -> None:
    """End the replaced keys of a node before their grace period is over."""
    with Client() as client:
        client.node_keys.end_old(node)
    out().print(f"only the newest key of {escape(node)} is valid")


@app.command("revoke-key")
@guarded
def revoke_key(node: NodeArgument, reason: ReasonOption) -> None:
    """End every key of a node. Its block returns to the queue when the lease expires. You can add the node again."""
    with Client() as client:
        client.node_keys.revoke(node, reason=reason)
    out().print(f"the key of {escape(node)} is revoked; other API processes learn of it within 10 s")


@app.command()
@guarded
def calibration(
    bundles: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[BUNDLE]...", help="A/A bundles. Default: the calibrations of the service."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the noise of devices, from A/A blocks, and the service's rate of false verdicts."""
    if not bundles:
        with Client() as client:
            answer = client.calibrations()
        print_json(answer) if as_json else out().print(tables.calibrations(answer))
        return
    from ablate.service.cli.calibrations import calibration_lines, read_calibrations  # imports the judge

    calibrations = read_calibrations(bundles)
    if as_json:
        print_json(list(calibrations))
        return
    for line in (line for one in calibrations for line in calibration_lines(one)):
        out().print(line)


def _print(rows: list[NodePublic], *, as_json: bool) -> None:
    print_json(rows) if as_json else out().print(tables.nodes(rows))
