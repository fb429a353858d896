"""Commands that talk to a service, each in a module of its name, which is imported when the command is asked for."""

import typer

from experiments.runtime.program import commands_in
from service.cli import commands

app = typer.Typer(cls=commands_in(commands))


@app.callback()
def client() -> None:
    """Ask a service."""
