"""`ablate worker`: the commands up, doctor, key and install."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ablate.experiments.documents import settings_problems
from ablate.experiments.errors import SigningUnavailable
from ablate.experiments.outcomes import ExitCode
from ablate.experiments.system.processes import OWN_PYTHON
from ablate.experiments.system.setting_values import checked_secret, read_secret
from ablate.workers.doctor import DoctorCheck, examine
from ablate.workers.environment_variables import replace_settings
from ablate.workers.errors import SettingsError, WorkerError
from ablate.workers.install import Installation, find_account
from ablate.workers.node import KEY_FILE, node_signer
from ablate.workers.settings import Settings, check_token, get_settings

app = typer.Typer(name="worker", help="Run and examine a worker on this machine.", no_args_is_help=True)


@app.command()
def up(
    exit_when_idle: Annotated[
        str | None, typer.Option(help="End when there was no block for this long, such as 10m.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="End at this ISO time, or after this duration, such as 8h.")] = None,
    max_blocks: Annotated[int | None, typer.Option(help="End after so many reported blocks.")] = None,
) -> None:
    """Run a worker in the foreground until Ctrl-C, SIGTERM or SIGUSR1.

    The options replace ABLATE_EXIT_WHEN_IDLE, ABLATE_UNTIL and ABLATE_MAX_BLOCKS.
    """
    replace_settings(exit_when_idle=exit_when_idle, until=until, max_blocks=max_blocks)
    command = [*OWN_PYTHON, "-m", "ablate.workers.app"]
    os.execv(sys.executable, command)  # noqa: S606 - the fork server needs a main module that costs nothing to import


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Check everything that a worker needs; exit 6 when something needed is missing."""
    try:
        checks = examine(get_settings())
    except WorkerError as error:
        Console(stderr=True).print(f"[red]not examined:[/red] {escape(str(error))}")
        raise typer.Exit(ExitCode.ERROR) from error
    if as_json:
        sys.stdout.write(json.dumps([dataclasses.asdict(check) for check in checks], indent=2) + "\n")
    else:
        Console().print(_table(checks))
    if any(check.needed and not check.passed for check in checks):
        raise typer.Exit(ExitCode.UNMET)


@app.command()
def key() -> None:
    """Print the public key of this machine's signatures; create the key if there is none."""
    try:
        signer = node_signer(get_settings().home_dir / KEY_FILE)
    except (WorkerError, SigningUnavailable) as error:
        Console(stderr=True).print(f"[red]no key:[/red] {escape(str(error))}")
        raise typer.Exit(ExitCode.ERROR) from error
    sys.stdout.write(signer.key + "\n")


@app.command()
def install(  # noqa: PLR0913, PLR0917 - a command's options are its function's arguments
    url: Annotated[str, typer.Option(help="Address of the service, as this machine reaches it.")],
    token_file: Annotated[Path, typer.Option(help="File with this node's key; - reads standard input.")],
    home: Annotated[
        Path | None, typer.Option(help="State folder. Default: /var/lib/ablate, with --gpu /var/lib/ablate-GPU.")
    ] = None,
    user: Annotated[str, typer.Option(help="User that the worker runs as.")] = "ablate",
    name: Annotated[str, typer.Option(help="Name of the node. Default: the host name.")] = "",
    node_class: Annotated[str, typer.Option(help="Node class. Default: that of the found devices.")] = "",
    gpu: Annotated[str, typer.Option(help="The one GPU that this worker uses, by index or UUID.")] = "",
    root: Annotated[Path, typer.Option(help="Folder that replaces / as the root of all written files.")] = Path("/"),
    replace: Annotated[bool, typer.Option(help="Overwrite files that differ.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Show the files and write nothing.")] = False,
) -> None:
    """Write a systemd unit and its environment file for a worker on this machine, without starting it.

    The file gets every setting of a worker that is a variable now, such as ABLATE_ACCEPT_CODE.
    """
    console = Console(soft_wrap=True, highlight=False)
    optional: dict[str, Any] = {"node_name": name, "node_class": node_class}
    try:
        settings = Settings(
            url=url,
            home=home or Path(f"/var/lib/ablate-{gpu}" if gpu else "/var/lib/ablate"),
            **{field: value for field, value in optional.items() if value},
        )
        installation = Installation(settings=settings, token=_read_token(token_file), user=user, root=root, gpu=gpu)
        if dry_run:
            _show(installation, console)
            return
        find_account(user)
        for sentence in installation.write(replace=replace):
            console.print(sentence)
    except (WorkerError, ValueError, OSError) as error:
        problem = "; ".join(settings_problems(error)) if isinstance(error, ValidationError) else str(error)
        Console(stderr=True, soft_wrap=True).print(f"[red]not installed:[/red] {escape(problem)}")
        raise typer.Exit(ExitCode.ERROR) from error
    console.print("now:")
    for command in installation.next_commands():
        console.print(f"  {command}")


def _read_token(path: Path) -> str:
    """Return the key. Raises ValueError, whose message names its origin."""
    if str(path) != "-":
        token = read_secret(path) or ""
    else:
        try:
            token = checked_secret(sys.stdin.read())
        except ValueError as error:
            raise SettingsError(f"standard input: {error}") from None
    check_token(token, "standard input" if str(path) == "-" else str(path))
    return token


def _show(installation: Installation, console: Console) -> None:
    for file in installation.files():
        console.print(f"# {file.path}, mode {file.mode:04o}", style="bold")
        console.print(file.shown, markup=False)
        console.print()


def _table(checks: list[DoctorCheck]) -> Table:
    table = Table(title="worker doctor", title_justify="left")
    for column in ("check", "state", "detail"):
        table.add_column(column, overflow="fold")
    for check in checks:
        table.add_row(check.name, _state(check), check.detail)
    return table


def _state(check: DoctorCheck) -> str:
    if check.passed:
        return "[green]ok[/green]"
    return "[red]missing[/red]" if check.needed else "[yellow]poorer[/yellow]"
