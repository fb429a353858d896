"""The SPEC argument of plan, submit and run: a file, "-" for standard input, or the name of a catalog spec."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from experiments.design.load import CONTENT_TYPE_OF_SUFFIX, catalog_names, read_catalog_file
from experiments.errors import SpecError, SpecProblem
from service.schemas.submissions import SpecBody

SpecArgument = Annotated[
    str, typer.Argument(metavar="SPEC", help="A spec file (YAML, JSON, TOML), - for standard input, or a catalog name.")
]


def read_spec(argument: str) -> SpecBody:
    """Return the spec that the argument names; raises SpecError with the possibilities when there is none."""
    if argument == "-":
        return SpecBody(content=sys.stdin.buffer.read())
    path = Path(argument)
    if path.is_file():
        return SpecBody(content=path.read_bytes(), content_type=_content_type(path))
    known = catalog_names()
    if argument in known:
        return SpecBody(content=read_catalog_file(argument))
    raise _refused(f"there is no file {argument!r} and no catalog spec of that name; catalog: {', '.join(known)}")


def _content_type(path: Path) -> str:
    kind = CONTENT_TYPE_OF_SUFFIX.get(path.suffix.lower())
    if kind is None:
        raise _refused(f"{path} ends in {path.suffix!r}; a spec file ends in {', '.join(CONTENT_TYPE_OF_SUFFIX)}")
    return kind


def _refused(detail: str) -> SpecError:
    return SpecError([SpecProblem(pointer="SPEC", detail=detail)])
