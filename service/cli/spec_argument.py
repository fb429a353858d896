"""The SPEC argument of plan, submit and run: a file, "-" for standard input, or the name of a catalog spec."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from experiments.design.problems import nearest
from experiments.design.spec_files import catalog_names, read_catalog_file
from experiments.errors import SpecError, SpecProblem
from service.cli import completion
from service.schemas.submissions import SpecBody

SpecArgument = Annotated[
    str,
    typer.Argument(
        metavar="SPEC",
        help="A spec file (YAML, JSON, TOML), - for standard input, or a catalog name.",
        autocompletion=completion.catalog,
    ),
]


def names_a_spec(argument: str) -> bool:
    """Say whether the argument is standard input, a file or a name of the catalog."""
    return argument == "-" or Path(argument).is_file() or argument in catalog_names()


def read_spec(argument: str) -> SpecBody:
    """Return the spec that the argument names; raises SpecError with the possibilities when there is none."""
    if argument == "-":
        return SpecBody(content=sys.stdin.buffer.read())
    path = Path(argument)
    if path.is_file():
        return SpecBody.of(path)
    if argument in catalog_names():
        return SpecBody(content=read_catalog_file(argument))
    raise SpecError([SpecProblem(pointer="SPEC", detail=no_spec(argument), hint=nearest(argument, catalog_names()))])


def no_spec(argument: str) -> str:
    """Say that the argument names no spec, and what would."""
    return f"there is no file {argument!r} and no catalog spec of that name; catalog: {', '.join(catalog_names())}"
