"""`ablate watch`: follow an ablation to its end."""

import typer

from service.cli.arguments import AblationArgument, ablation_id
from service.cli.follow import follow_to_end
from service.cli.output import StreamOption, guarded
from service.client.api import Client

app = typer.Typer()


@app.command()
@guarded
def watch(ablation: AblationArgument, as_json: StreamOption = False) -> None:
    """Follow an ablation to its end. Ctrl-C detaches (exit code 130) and cancels nothing."""
    with Client() as client:
        follow_to_end(client, ablation_id(client, ablation), as_json=as_json)
