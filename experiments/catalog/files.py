"""Spec files: the format of a name, and the specs that ship with the program. No function parses a spec."""

from collections.abc import Mapping
from importlib import resources
from pathlib import PurePath

from ablate.experiments.design.problems import listed, nearest, shown
from ablate.experiments.errors import SpecError, SpecProblem

CONTENT_TYPE_OF_SUFFIX: Mapping[str, str] = {
    ".yaml": "application/yaml",
    ".yml": "application/yaml",
    ".json": "application/json",
}
"""Content type of a spec file by its suffix."""


def content_type_of(path: PurePath) -> str:
    """Return the content type of a spec file. Raises SpecError for an unknown suffix."""
    kind = CONTENT_TYPE_OF_SUFFIX.get(path.suffix.lower())
    if kind is None:
        detail = f"{path} ends in {path.suffix!r}; a spec file ends in {', '.join(CONTENT_TYPE_OF_SUFFIX)}"
        raise SpecError([SpecProblem(pointer="#", detail=detail)])
    return kind


def catalog_names() -> tuple[str, ...]:
    """Return the names of the specs that ship with the program, sorted."""
    names = (entry.name for entry in resources.files("ablate.experiments.catalog").iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def read_catalog_file(name: str) -> bytes:
    """Return the YAML of the shipped spec `name`. Raises SpecError for an unknown name."""
    names = catalog_names()
    if name not in names:
        detail = f"no catalog spec is named {shown(name)}; known: {listed(names)}"
        raise SpecError([SpecProblem(pointer="#", detail=detail, hint=nearest(name, names))])
    return resources.files("ablate.experiments.catalog").joinpath(f"{name}.yaml").read_bytes()
