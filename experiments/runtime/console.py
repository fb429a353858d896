"""The `ablate` program: collects the command groups that the layers declare as entry points.

A group whose packages are absent on a machine (a GPU node has no API) stays listed, with what it lacks, and does
not break the others.
"""

import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points, version
from typing import Annotated

import typer

from experiments.outcomes import ERROR_EXIT_CODE

GROUP = "ablate.commands"

_HELP = (
    "Is this change to the training stack better, by how much, and can I trust that? "
    "Start with `ablate demo`; exit codes: 2 wrong usage, 5 any other error, `verdict` has its own."
)


def main() -> None:
    """Run the program with the arguments of this process."""
    build(entry_points(group=GROUP))(prog_name="ablate")


def build(groups: Iterable[EntryPoint]) -> typer.Typer:
    """Return the program. A group that names itself becomes a sub-command, the others are merged at the top."""
    root = typer.Typer(
        help=_HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    root.callback()(_options)
    for entry in sorted(groups, key=lambda entry: entry.name):
        _mount(root, entry)
    return root


def _mount(root: typer.Typer, entry: EntryPoint) -> None:
    try:
        app: typer.Typer = entry.load()
    except ModuleNotFoundError as error:
        _mount_lacking(root, entry.name, error.name or str(error))
        return
    if isinstance(app.info.name, str):
        root.add_typer(app, name=app.info.name)
    else:
        root.add_typer(app)


def _mount_lacking(root: typer.Typer, name: str, package: str) -> None:
    sentence = f"The {name} commands are not available here: package '{package}' is not installed."

    @root.command(name, help=sentence, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
    def lacking() -> None:
        sys.stderr.write(sentence + "\n")
        raise typer.Exit(ERROR_EXIT_CODE)


def _print_version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"ablate {version('ablate')}\n")
        raise typer.Exit


def _options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    return
