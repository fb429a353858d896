"""`ablate admin backup`: copy the database of this home."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ablate.service.cli.output import JsonOption, guarded, out, print_json
from ablate.service.settings import get_settings

app = typer.Typer()


@app.command()
@guarded
def backup(file: Annotated[Path, typer.Argument(help="The new file.")], as_json: JsonOption = False) -> None:
    """Copy the database of this home to a new file. The stack may be running."""
    from ablate.service.stack.backup import back_up  # imports SQLAlchemy

    size = back_up(get_settings().sqlalchemy_url, file)
    if as_json:
        print_json({"file": str(file.absolute()), "bytes": size})
    else:
        out().print(f"{escape(str(file))}: {size:,} bytes; rebuild MLflow from it with: ablate mlflow rebuild")
