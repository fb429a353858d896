"""`ablate watch`: follow an ablation to its end."""

import typer

from service.cli.names import AblationArgument, ablation_id
from service.cli.output import StreamOption, guarded
from service.cli.submitting import follow_to_end
from service.client.api import Client

app = typer.Typer()


@app.command()
@guarded
def watch(ablation: AblationArgument, as_json: StreamOption = False) -> None:
    """Follow an ablation to its end. Ctrl-C detaches (exit code 130) and cancels nothing."""
    with Client() as client:
        follow_to_end(client, ablation_id(client, ablation), as_json=as_json)
