"""`ablate show`: one ablation and its trials."""

import typer

from service.cli import tables
from service.cli.arguments import AblationArgument, ablation_id
from service.cli.output import JsonOption, guarded, out, print_json
from service.client.api import Client

app = typer.Typer()


@app.command("show")
@guarded
def show_(ablation: AblationArgument, as_json: JsonOption = False) -> None:
    """Show one ablation and its trials."""
    with Client() as client:
        name = ablation_id(client, ablation)
        row, trials = client.ablations.get(name), list(client.ablations.trials(name))
    if as_json:
        print_json({"ablation": row, "trials": trials})
    else:
        out().print(tables.ablation(row, trials))
