"""Commands that talk to a service, one module each in `ablate.service.cli.commands`, imported only when asked for."""

import typer

from ablate.experiments.system.console import commands_in
from ablate.service.cli import commands

app = typer.Typer(cls=commands_in(commands))


@app.callback()
def client() -> None:
    """Talk to a service."""
