"""The `ablate` program: the command groups that the layers declare as entry points.

A group whose packages are not installed (a GPU node has no API) stays listed and names the missing package. It does
not break the other groups.
"""

import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, distribution, version
from typing import Annotated, Any, ClassVar

import typer
from typer.main import get_group

from experiments.outcomes import ExitCode
from experiments.runtime.command_groups import CommandFolder, CommandGroup, outlines

GROUP = "ablate.commands"

_HELP = (
    "Is a change to the training stack better, by how much, and can you trust the answer? "
    f"Start with `ablate demo`. Exit codes: 0 success, 1 to 4 a decision, {ExitCode.ERROR} an error, "
    f"{ExitCode.UNMET} a failed check, {ExitCode.USAGE} wrong usage. docs/ci.md lists all of them."
)


def main() -> None:
    """Run the program with the arguments of this process."""
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]  # httpx's own command: a fifth of our start
    build(distribution("ablate").entry_points.select(group=GROUP))(prog_name="ablate")


def build(groups: Iterable[EntryPoint]) -> typer.Typer:
    """Return the program made of these groups.

    A group with a name becomes a sub-command; the commands of the other groups appear at the top level.
    """
    root = typer.Typer(
        cls=type("Ablate", (_Program,), {"entries": tuple(sorted(groups, key=lambda entry: entry.value))}),
        help=_HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    root.callback()(_options)
    return root


class _Program(CommandGroup):
    """The commands of all groups. Looking up a command imports groups until one has it."""

    entries: ClassVar[tuple[EntryPoint, ...]] = ()
    _writes_help = False

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write the help without importing any command."""
        self._writes_help = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._writes_help = False

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # Typer's own class is private
        """Return the names of all commands."""
        return [name for entry in self.entries for name in _outlines_of(entry)]

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        """Return the command of this name, or None."""
        if self._writes_help:
            return next(outline for entry in self.entries if (outline := _outlines_of(entry).get(cmd_name)))
        for entry in sorted(self.entries, key=lambda entry: entry.name != cmd_name):
            group = _group(entry)
            command = group if group.name == cmd_name else None if group.name else group.get_command(ctx, cmd_name)
            if command is not None:
                return command
        return None


@cache
def _group(entry: EntryPoint) -> Any:
    try:
        app: typer.Typer = entry.load()
    except ModuleNotFoundError as error:
        app = _placeholder(entry.name, error.name or str(error))
    return get_group(app)


@cache
def _outlines_of(entry: EntryPoint) -> dict[str, Any]:
    """Return name and help of a group's commands, imported only where its source does not show them."""
    if declared := outlines(entry.module):
        return dict(declared)
    group = _group(entry)
    if isinstance(group, CommandFolder):
        return dict(group.outlines())
    return {group.name: group} if group.name else group.commands


def _placeholder(name: str, package: str) -> typer.Typer:
    sentence = f"The {name} commands are not available here: package '{package}' is not installed."
    app = typer.Typer()

    @app.command(name, help=sentence, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
    def unavailable() -> None:
        sys.stderr.write(sentence + "\n")
        raise typer.Exit(ExitCode.ERROR)

    return app


def _print_version(requested: bool) -> None:
    if requested:
        sys.stdout.write(f"ablate {version('ablate')}\n")
        raise typer.Exit


def _options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    return
