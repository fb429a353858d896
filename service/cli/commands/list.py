"""`ablate list`: the newest ablations."""

from itertools import islice
from typing import Annotated

import typer

from ablate.experiments.design.problems import nearest
from ablate.experiments.outcomes import AblationState
from ablate.service.cli import tables
from ablate.service.cli.output import JsonOption, guarded, out, print_json
from ablate.service.client.api import Client

app = typer.Typer()


def _state(text: str) -> AblationState:
    if text not in list(AblationState):
        hint = nearest(text, AblationState)
        raise typer.BadParameter(f"{text!r} is none of {', '.join(AblationState)}{'' if hint is None else '; ' + hint}")
    return AblationState(text)


@app.command("list")
@guarded
def list_(
    state: Annotated[
        AblationState | None,
        typer.Option(parser=_state, metavar="STATE", help=f"Only ablations in this state: {', '.join(AblationState)}."),
    ] = None,
    label: Annotated[str | None, typer.Option(help="Only ablations with this label (key=value).")] = None,
    name: Annotated[str | None, typer.Option(help="Only ablations of this name.")] = None,
    owner: Annotated[str | None, typer.Option(help="Only ablations that this token submitted or imported.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List ablations, newest first."""
    with Client() as client:
        rows = list(islice(client.ablations.list(state=state, label=label, name=name, owner=owner), limit))
    print_json(rows) if as_json else out().print(tables.ablations(rows))
