"""`ablate log`: a trial's log."""

from typing import Annotated

import typer

from service.cli.names import TrialArgument, trial_id
from service.cli.output import JsonOption, guarded, print_json, print_text
from service.client import Client

app = typer.Typer()


@app.command()
@guarded
def log(
    trial: TrialArgument,
    offset: Annotated[int, typer.Option(min=0, help="Start at this byte.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Print a trial's log as far as it has come."""
    with Client() as client:
        text, end = client.trials.log(trial_id(client, trial), offset=offset)
    print_json({"text": text, "end": end}) if as_json else print_text(text)
