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
from experiments.runtime.outline import outlines
from experiments.runtime.program import Folder, ManyCommands
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
    _writes_help = False

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write the help; for its list no command is imported."""
        self._writes_help = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._writes_help = False

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # Typer's own class is private
        """Return the names of all commands."""
        return [name for entry in self.entries for name in _listed(entry)]

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        """Return a command; None when no group has it."""
        if self._writes_help:
            return next(_listed(entry)[cmd_name] for entry in self.entries if cmd_name in _listed(entry))
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


@cache
def _listed(entry: EntryPoint) -> dict[str, Any]:
    """Return by name what help lists of a group: read from its file or its folder, else asked of the group."""
    if declared := outlines(entry.module):
        return dict(declared)
    group = _group(entry)
    if isinstance(group, Folder):
        return dict(group.listed())
    return {group.name: group} if group.name else group.commands


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
