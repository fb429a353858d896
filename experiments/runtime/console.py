"""The `ablate` program: collects the command groups that the layers declare as entry points.

A group whose packages are absent on a machine (a GPU node has no API) stays listed, with what it lacks, and does
not break the others.
"""

import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points, version
from typing import Annotated, Any, ClassVar

import typer
from typer.main import get_group

from experiments.outcomes import ExitCode
from experiments.runtime.program import ManyCommands

GROUP = "ablate.commands"

_HELP = (
    "Is this change to the training stack better, by how much, and can I trust that? "
    f"Start with `ablate demo`. Exit codes: 0 done, 1 to 4 a decision, {ExitCode.ERROR} an error, {ExitCode.UNMET} a "
    f"check that does not hold, {ExitCode.USAGE} wrong usage; docs/ci.md lists all."
)


def main() -> None:
    """Run the program with the arguments of this process."""
    build(entry_points(group=GROUP))(prog_name="ablate")


def build(groups: Iterable[EntryPoint]) -> typer.Typer:
    """Return the program. A group that names itself becomes a sub-command, the others are merged at the top."""
    root = typer.Typer(
        cls=type("Ablate", (_Program,), {"entries": tuple(sorted(groups, key=lambda entry: entry.name))}),
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

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._left = list(self.entries)

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # Typer's own class is private
        """Return the names of all commands."""
        while self._left:
            self._take(self._left[0])
        return super().list_commands(ctx)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        """Return a command; None when no group has it."""
        for entry in sorted(self._left, key=lambda entry: entry.name != cmd_name):
            if cmd_name in self.commands:
                break
            self._take(entry)
        return super().get_command(ctx, cmd_name)

    def _take(self, entry: EntryPoint) -> None:
        self._left.remove(entry)
        group = get_group(_group(entry))
        self.commands.update({group.name: group} if group.name else group.commands)


def _group(entry: EntryPoint) -> typer.Typer:
    try:
        app: typer.Typer = entry.load()
    except ModuleNotFoundError as error:
        return _lacking(entry.name, error.name or str(error))
    return app


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
        sys.stdout.write(f"ablate {version('ablate')}\n")
        raise typer.Exit


def _options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    return
