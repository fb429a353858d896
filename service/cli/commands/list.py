"""`ablate list`: the newest ablations."""

from typing import Annotated

import typer

from experiments.design.problems import nearest
from experiments.outcomes import AblationState
from service.cli import show
from service.cli.output import JsonOption, guarded, out, print_json
from service.client.api import Client

app = typer.Typer()


def _state(given: str) -> AblationState:
    if given not in list(AblationState):
        hint = nearest(given, AblationState)
        raise typer.BadParameter(
            f"{given!r} is none of {', '.join(AblationState)}{'' if hint is None else '; ' + hint}"
        )
    return AblationState(given)


@app.command("list")
@guarded
def list_(
    state: Annotated[
        AblationState | None,
        typer.Option(parser=_state, metavar="STATE", help=f"Only ablations in this state: {', '.join(AblationState)}."),
    ] = None,
    label: Annotated[str | None, typer.Option(help="Only with this label, written key=value.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many, newest first.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List ablations, newest first."""
    with Client() as client:
        found = client.ablations.list(state=state, label=label)
        rows = [row for row, _ in zip(found, range(limit), strict=False)]
    print_json(rows) if as_json else out().print(show.ablations(rows))
