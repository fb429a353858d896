"""`ablate admin priority`: an ablation's place in the queue."""

from typing import Annotated

import typer

from ablate.service.cli import tables
from ablate.service.cli.arguments import AblationArgument, ablation_id
from ablate.service.cli.output import JsonOption, guarded, out, print_json
from ablate.service.client.api import Client

app = typer.Typer()


@app.command()
@guarded
def priority(
    ablation: AblationArgument,
    value: Annotated[int, typer.Argument(metavar="PRIORITY", min=0, max=100, help="0 to 100. Higher runs first.")],
    as_json: JsonOption = False,
) -> None:
    """Change an ablation's priority. Ablations of equal priority alternate, one block each."""
    with Client() as client:
        row = client.ablations.set_priority(ablation_id(client, ablation), value)
    print_json(row) if as_json else out().print(tables.ablations([row]))
