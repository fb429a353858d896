"""`ablate worker up` and `ablate worker doctor`."""

import dataclasses
import json
import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from experiments.errors import SigningUnavailable
from workers.doctor import Finding, examine
from workers.errors import WorkerError
from workers.node_key import KEY_FILE, node_signer
from workers.settings import get_settings

app = typer.Typer(name="worker", help="Run and examine a worker on this machine.", no_args_is_help=True)


@app.command()
def up() -> None:
    """Run a worker in the foreground until Ctrl-C or SIGTERM."""
    command = [sys.executable, "-m", "workers.app"]
    os.execv(sys.executable, command)  # noqa: S606 - the fork server needs a main module that costs nothing to import


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Check what a worker needs; exit 1 when something needed is missing."""
    checks = examine(get_settings())
    if as_json:
        sys.stdout.write(json.dumps([dataclasses.asdict(check) for check in checks], indent=2) + "\n")
    else:
        Console().print(_table(checks))
    if any(check.needed and not check.passed for check in checks):
        raise typer.Exit(1)


@app.command()
def key() -> None:
    """Print the public key that this machine signs its blocks with; make the key when there is none."""
    try:
        signer = node_signer(get_settings().home_dir / KEY_FILE)
    except (WorkerError, SigningUnavailable) as error:
        Console(stderr=True).print(f"[red]no key:[/red] {error}")
        raise typer.Exit(1) from error
    sys.stdout.write(signer.key + "\n")


def _table(checks: list[Finding]) -> Table:
    table = Table(title="worker doctor", title_justify="left")
    for column in ("check", "state", "detail"):
        table.add_column(column, overflow="fold")
    for check in checks:
        table.add_row(check.name, _state(check), check.detail)
    return table


def _state(check: Finding) -> str:
    if check.passed:
        return "[green]ok[/green]"
    return "[red]missing[/red]" if check.needed else "[yellow]poorer[/yellow]"
