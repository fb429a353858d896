"""The commands of the `ablate` program: groups that the layers declare as entry points.

A group whose packages are absent on a machine (a GPU node has no API) stays listed, with what it lacks, and does
not break the others.
"""

import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, distribution
from typing import Annotated, Any, ClassVar

import typer
from typer.main import get_group

from experiments.outcomes import ExitCode
from experiments.runtime.program import ManyCommands
from experiments.runtime.version import print_version

GROUP = "ablate.commands"

_HELP = (
    "Is this change to the training stack better, by how much, and can I trust that? "
    f"Start with `ablate demo`. Exit codes: 0 done, 1 to 4 a decision, {ExitCode.ERROR} an error, {ExitCode.UNMET} a "
    f"check that does not hold, {ExitCode.USAGE} wrong usage; docs/ci.md lists all."
)


def run() -> None:
    """Run the program with the arguments of this process."""
    build(distribution("ablate").entry_points.select(group=GROUP))(prog_name="ablate")


def build(groups: Iterable[EntryPoint]) -> typer.Typer:
    """Return the program. A group that names itself becomes a sub-command, the others are merged at the top."""
    root = typer.Typer(
        cls=type("Ablate", (_Program,), {"entries": tuple(sorted(groups, key=lambda entry: entry.value))}),
        help=_HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    root.callback()(_options)
    return root


class _Program(ManyCommands):
    """The commands of all groups; a group is imported when a command is asked for that none before it has."""

    entries: ClassVar[tuple[EntryPoint, ...]] = ()

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # Typer's own class is private
        """Return the names of all commands."""
        groups = map(_group, self.entries)
        return [name for group in groups for name in ([group.name] if group.name else group.list_commands(ctx))]

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        """Return a command; None when no group has it."""
        for entry in sorted(self.entries, key=lambda entry: entry.name != cmd_name):
            group = _group(entry)
            found = group if group.name == cmd_name else None if group.name else group.get_command(ctx, cmd_name)
            if found is not None:
                return found
        return None


@cache
def _group(entry: EntryPoint) -> Any:
    try:
        app: typer.Typer = entry.load()
    except ModuleNotFoundError as error:
        app = _lacking(entry.name, error.name or str(error))
    return get_group(app)


def _lacking(name: str, package: str) -> typer.Typer:
    sentence = f"The {name} commands are not available here: package '{package}' is not installed."
    app = typer.Typer()

    @app.command(name, help=sentence, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
    def lacking() -> None:
        sys.stderr.write(sentence + "\n")
        raise typer.Exit(ExitCode.ERROR)

    return app


def _print_version(asked: bool) -> None:
    if asked:
        print_version()
        raise typer.Exit


def _options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    return
