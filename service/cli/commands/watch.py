"""`ablate watch`: follow an ablation to its end."""

import typer

from ablate.service.cli.arguments import AblationArgument, ablation_id
from ablate.service.cli.follow import follow_to_end
from ablate.service.cli.output import StreamOption, guarded
from ablate.service.client.api import Client

app = typer.Typer()


@app.command()
@guarded
def watch(ablation: AblationArgument, as_json: StreamOption = False) -> None:
    """Follow an ablation to its end. Ctrl-C detaches (exit code 130) and cancels nothing."""
    with Client() as client:
        follow_to_end(client, ablation_id(client, ablation), as_json=as_json)
