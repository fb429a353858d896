"""`ablate cancel`: cancel an ablation."""

import typer
from rich.markup import escape

from ablate.service.cli import tables
from ablate.service.cli.arguments import AblationArgument, ablation_id
from ablate.service.cli.output import JsonOption, guarded, out, print_json
from ablate.service.client.api import Client

app = typer.Typer()


@app.command()
@guarded
def cancel(ablation: AblationArgument, as_json: JsonOption = False) -> None:
    """Cancel an ablation. The service keeps its measurements."""
    with Client() as client:
        row = client.ablations.cancel(ablation_id(client, ablation))
    print_json(row) if as_json else out().print(f"{escape(row.name)} ({row.id}) is {tables.state(row.state)}")
