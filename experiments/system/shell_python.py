"""The Python environment of the user's shell, in which an own program runs instead of in Ablate's."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

_ACTIVE = ("VIRTUAL_ENV", "CONDA_PREFIX")
_OF_THE_SYSTEM = (Path("/"), Path("/usr"), Path("/usr/local"))
"""Bases of environments that every trial may read."""


class ShellCommand(NamedTuple):
    """A command as a trial runs it."""

    argv: tuple[str, ...]
    folders: tuple[str, ...] = ()
    """Absolute folders of its Python environment, which a trial must be able to read."""
    search_path: str = ""
    """PYTHONPATH below the program's folder, without which the environment imports that folder and not a copy of it."""


def in_shell_python(
    command: Sequence[str], code: Path = Path(), variables: Mapping[str, str] = os.environ
) -> ShellCommand:
    """Return the command with the program that the user's shell would start, where that is not of Ablate's environment.

    `code` is the program's folder. A bare name such as python or torchrun is one of the active environment
    (VIRTUAL_ENV, CONDA_PREFIX); a path such as .venv/bin/python names its own. Any other command stays as it is.
    """
    word = command[0]
    active = next((variables[name] for name in _ACTIVE if variables.get(name)), None)
    if "/" in word:
        program = Path(word).absolute()
    elif active is not None:
        program = Path(active).absolute() / "bin" / word
    else:
        return ShellCommand(tuple(command))
    prefix = program.parent.parent
    if not _is_environment(prefix) or not program.is_file() or prefix.samefile(sys.prefix):
        return ShellCommand(tuple(command))
    folders = tuple(map(str, (prefix, *_base_of(prefix))))
    return ShellCommand((str(program), *command[1:]), folders, os.pathsep.join(_installed_from(code.resolve(), prefix)))


def editable_projects(prefix: Path) -> Iterator[Path]:
    """Yield the folders of the projects that are installed editable in an environment."""
    for file in sorted(prefix.glob("lib*/python3*/*-packages/*.dist-info/direct_url.json")):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            values = json.loads(file.read_text(encoding="utf-8"))
            if values["dir_info"].get("editable"):
                yield Path(unquote(urlsplit(values["url"]).path))


def _installed_from(code: Path, prefix: Path) -> Iterator[str]:
    """Yield the folders below `code` from which the environment imports."""
    for project in dict.fromkeys(editable_projects(prefix)):
        if project.resolve().is_relative_to(code):
            source = project / "src" if (project / "src").is_dir() else project
            yield str(source.resolve().relative_to(code))


def _is_environment(prefix: Path) -> bool:
    return (prefix / "pyvenv.cfg").is_file() or (prefix / "conda-meta").is_dir()


def _base_of(prefix: Path) -> tuple[Path, ...]:
    """Return the installation from which an environment was made; none for one of the system or a whole one."""
    file = prefix / "pyvenv.cfg"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    values = {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines)}
    base = Path(values["home"]).parent if "home" in values else _OF_THE_SYSTEM[0]
    return () if base in _OF_THE_SYSTEM else (base,)
