"""Commands that talk to a service, one module each in `ablate.service.cli.commands`, imported only when asked for."""

import typer

from ablate.experiments.system.console import commands_in
from ablate.service.cli import commands

GROUPS = {
    "admin": "Administer a service: tokens, keys, notifications, priorities, the database, MLflow.",
    "catalog": "Show what a spec can name: gates, recipes, and the schema of specs.",
    "offline": "Measure, verify and judge without a service, and import the result into one.",
}

app = typer.Typer(cls=commands_in(commands, GROUPS))


@app.callback()
def client() -> None:
    """Talk to a service."""
