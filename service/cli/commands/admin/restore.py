"""`ablate admin restore`: put a backup back."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ablate.service.cli.output import JsonOption, guarded, out, print_json
from ablate.service.settings import get_settings
from ablate.service.stack.layout import home_files

app = typer.Typer()


@app.command()
@guarded
def restore(
    file: Annotated[Path, typer.Argument(help="A file from `ablate backup`.")],
    keep_revocations: Annotated[
        bool,
        typer.Option(
            "--keep-revocations", help="End again what was revoked or replaced since the backup: tokens and keys."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Replace the database of this home with a backup. The stack must be down.

    Tokens and keys that were revoked since the backup are valid again, and are listed, unless --keep-revocations.
    """
    from ablate.service.stack.backup import restore as put_back

    previous, revived = put_back(get_settings().sqlalchemy_url, file, home_files(), keep_revocations=keep_revocations)
    if as_json:
        ended = {"revived": [] if keep_revocations else revived, "ended_again": revived if keep_revocations else []}
        print_json({"kept": None if previous is None else str(previous), **ended})
        return
    if previous is not None:
        out().print(f"the previous database is now {escape(str(previous))}")
    if revived is None:
        out().print("[yellow]nobody can read it, so whatever was revoked since the backup is valid again[/]")
    for line in revived or ():
        out().print(f"  {'ended again' if keep_revocations else '[red]valid again[/]'}  {escape(line)}")
    if revived and not keep_revocations:
        out().print("end them again: ablate restore --keep-revocations FILE, or revoke each")
    out().print("restored; next: ablate up    ablate mlflow rebuild")
