"""`ablate offline assess`: judge a published table by our rules."""

from pathlib import Path
from typing import Annotated

import typer

from ablate.experiments.analysis.published import assess, read_table
from ablate.service.cli import verdict_tables
from ablate.service.cli.output import JsonOption, guarded, out, print_json

app = typer.Typer()


@app.command("assess")
@guarded
def assess_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The table as YAML. docs/published/ has an example.")],
    as_json: JsonOption = False,
) -> None:
    """Judge a table that somebody published, by our rules. Needs no service."""
    table = read_table(file.read_bytes())
    verdict = assess(table)
    print_json(verdict) if as_json else out().print(verdict_tables.published(table, verdict))
