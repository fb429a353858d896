"""`ablate assess`: the word that a table printed by others deserves."""

from pathlib import Path
from typing import Annotated

import typer

from experiments.analysis.published import assess, read_table
from service.cli import show_verdict
from service.cli.output import JsonOption, guarded, out, print_json

app = typer.Typer()


@app.command("assess")
@guarded
def assess_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The table as YAML; see docs/published/.")],
    as_json: JsonOption = False,
) -> None:
    """Judge a table that others printed, by our rules. Needs no service."""
    table = read_table(file.read_bytes())
    found = assess(table)
    print_json(found) if as_json else out().print(show_verdict.published(table, found))
