"""`ablate log`: a trial's log."""

import typer
from rich.markup import escape

from ablate.service.cli.arguments import TrialArgument, trial_at
from ablate.service.cli.output import JsonOption, err, guarded, print_json, print_text
from ablate.service.client.api import Client

app = typer.Typer()


@app.command()
@guarded
def log(
    trial: TrialArgument,
    as_json: JsonOption = False,
) -> None:
    """Print a trial's log so far, and the reason if the trial did not measure."""
    with Client() as client:
        row = None if trial.startswith("trl_") else trial_at(client, trial)
        text, end = client.trials.log(trial if row is None else row.id)
    if as_json:
        print_json({"text": text, "end": end})
        return
    print_text(text)
    if row is not None and row.reason is not None:
        err().print(f"[yellow]{escape(row.outcome or row.state)}[/]: {escape(row.reason)}")
