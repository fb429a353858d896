"""The Python environment of the user's shell, in which an own program runs instead of in Ablate's."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_ACTIVE = ("VIRTUAL_ENV", "CONDA_PREFIX")
_OF_THE_SYSTEM = (Path("/"), Path("/usr"), Path("/usr/local"))
"""Bases of environments that every trial may read."""


class ShellCommand(NamedTuple):
    """A command as a trial runs it."""

    argv: tuple[str, ...]
    folders: tuple[str, ...] = ()
    """Absolute folders of its Python environment, which a trial must be able to read."""


def in_shell_python(command: Sequence[str], variables: Mapping[str, str] = os.environ) -> ShellCommand:
    """Return the command with the program that the user's shell would start, where that is not of Ablate's environment.

    A bare name such as python or torchrun is one of the active environment (VIRTUAL_ENV, CONDA_PREFIX); a path such as
    .venv/bin/python names its own. Any other command stays as it is.
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
    return ShellCommand((str(program), *command[1:]), tuple(map(str, (prefix, *_base_of(prefix)))))


def _is_environment(prefix: Path) -> bool:
    return (prefix / "pyvenv.cfg").is_file() or (prefix / "conda-meta").is_dir()


def _base_of(prefix: Path) -> tuple[Path, ...]:
    """Return the installation from which an environment was made; none for one of the system or a whole one."""
    file = prefix / "pyvenv.cfg"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    values = {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines)}
    base = Path(values["home"]).parent if "home" in values else _OF_THE_SYSTEM[0]
    return () if base in _OF_THE_SYSTEM else (base,)
