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

from ablate.experiments.outcomes import ExitCode
from ablate.experiments.system.command_groups import CommandGroup, load_group

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

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # Typer's own class is private
        """Return the names of all commands."""
        groups = [_group(entry) for entry in self.entries]
        return [name for group in groups for name in ([group.name] if group.name else group.list_commands(ctx))]

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        """Return the command of this name, or None."""
        for entry in sorted(self.entries, key=lambda entry: entry.name != cmd_name):
            group = _group(entry)
            command = group if group.name == cmd_name else None if group.name else group.get_command(ctx, cmd_name)
            if command is not None:
                return command
        return None


@cache
def _group(entry: EntryPoint) -> Any:
    return load_group(entry.name, entry.load)


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
