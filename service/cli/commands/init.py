"""`ablate init`: write a spec to start from, and the schema with which editors check it."""

import json
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ablate.experiments.catalog.files import read_catalog_file
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.spec import ablation_json_schema
from ablate.experiments.documents import write_whole
from ablate.experiments.errors import SpecError, SpecProblem
from ablate.service.cli import completion
from ablate.service.cli.output import JsonOption, guarded, out, print_json

app = typer.Typer()

SCHEMA = "ablation.schema.json"
_SUFFIXES = (".yaml", ".yml")
_MODELINE = f"# yaml-language-server: $schema={SCHEMA}\n"


@app.command()
@guarded
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The new file. Its name becomes the ablation's name.")],
    like: Annotated[
        str,
        typer.Option(
            metavar="CATALOG",
            help="The catalog spec to start from; `command` is for a program of your own.",
            autocompletion=completion.catalog,
        ),
    ] = "first",
    as_json: JsonOption = False,
) -> None:
    """Write a commented spec, and beside it the schema with which editors complete and check it."""
    text = own_spec(file, like)
    _write_new(file, text)
    schema = file.with_name(SCHEMA)
    write_whole(schema, json.dumps(ablation_json_schema(), indent=1) + "\n")
    if as_json:
        print_json({"spec": str(file), "schema": str(schema)})
        return
    name = escape(str(file))
    out().print(f"wrote {name}, a copy of catalog spec '{escape(like)}', and {escape(str(schema))} for editors")
    out().print(f"  look   ablate plan {name}\n  run    ablate run {name}")


def own_spec(file: Path, like: str) -> str:
    """Return the catalog spec `like`, renamed after `file`, with the line that names the schema to editors.

    Raises SpecError for an unknown spec, or if a spec cannot have the name or suffix of `file`.
    """
    if file.suffix not in _SUFFIXES:
        raise _problem(f"{str(file)!r} ends in {file.suffix!r}; allowed: {', '.join(_SUFFIXES)}")
    name = json.dumps(file.stem)  # quoted: YAML reads some names as numbers or booleans
    text = re.sub(
        r"^ablation: .*$", lambda _: f"ablation: {name}", read_catalog_file(like).decode(), flags=re.MULTILINE
    )
    parse_spec(text.encode(), "application/yaml")
    return _MODELINE + text


def _write_new(file: Path, text: str) -> None:
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError as error:
        raise _problem(f"{str(file)!r} exists; this command overwrites nothing") from error


def _problem(detail: str) -> SpecError:
    return SpecError([SpecProblem(pointer="FILE", detail=detail)])
