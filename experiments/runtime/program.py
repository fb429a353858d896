"""How our programs end: with an exit code that has one meaning, and quietly where the reader of their output left."""

import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from keyword import iskeyword
from types import ModuleType
from typing import Any, ClassVar, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from experiments.outcomes import ExitCode
from experiments.runtime.outline import outlines

_USAGE = 2
"""Typer's own code for wrong usage, which is that of a decision here."""


class OneCommand(TyperCommand):
    """A program that is one command."""

    def main(self, *arguments: Any, **options: Any) -> NoReturn:
        """Run it and end the process with an `ExitCode`."""
        end_with(super().main, *arguments, **options)


class ManyCommands(TyperGroup):
    """A program of many commands."""

    meant: ClassVar[Mapping[str, str]] = {}
    """By words that are no commands and that people try: what to do instead."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first word asks for; one that is none gets what it means, or the nearest ones."""
        if args[0] in self.meant:
            ctx.fail(f"No such command '{args[0]}'. {self.meant[args[0]]}")
        return super().resolve_command(ctx, args)

    def main(self, *arguments: Any, **options: Any) -> NoReturn:
        """Run one of them and end the process with an `ExitCode`."""
        end_with(super().main, *arguments, **options)


def commands_in(package: ModuleType) -> type[ManyCommands]:
    """Return the group of a folder's commands: a module each, of the command's name, with its Typer as `app`.

    A module is imported when its command is asked for.
    """
    return type("Folder", (Folder,), {"package": package})


class Folder(ManyCommands):
    """The commands of a folder."""

    package: ClassVar[ModuleType]

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # Typer's own class is private
        """Return the names of all commands."""
        return sorted(_command(found.name) for found in pkgutil.iter_modules(self.package.__path__))

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        """Return a command; None when there is no module for it."""
        if cmd_name not in self.commands and cmd_name in self.list_commands(ctx):
            group = get_group(import_module(f"{self.package.__name__}.{_module(cmd_name)}").app)
            self.commands[cmd_name] = group if group.name else group.commands[cmd_name]
        return self.commands.get(cmd_name)

    def listed(self) -> dict[str, TyperCommand]:
        """Return by name what help lists of the commands, without importing them."""
        modules = sorted(found.name for found in pkgutil.iter_modules(self.package.__path__))
        return {name: one for module in modules for name, one in outlines(f"{self.package.__name__}.{module}").items()}


def _command(module: str) -> str:
    return module.rstrip("_").replace("_", "-")


def _module(command: str) -> str:
    """Return the module of a command; a name that Python keeps for itself ends with an underscore."""
    return f"{command}_" if iskeyword(command) else command.replace("-", "_")


def end_with(run: Callable[..., Any], *arguments: Any, **options: Any) -> NoReturn:
    """Run a command of Typer's and end the process with the `ExitCode` of how that went."""
    try:
        code = run(*arguments, **{**options, "standalone_mode": False})
        sys.stdout.flush()
    except BrokenPipeError:
        code = _pipe_closed()
    except SystemExit as ending:
        code = _pipe_closed() if isinstance(ending.__context__, BrokenPipeError) else ending.code
    except typer.Abort:
        code = ExitCode.DETACHED
    except typer.TyperException as error:
        from typer import rich_utils  # a third of the time that the program takes to start

        rich_utils.rich_format_error(error)  # type: ignore[arg-type]  # every one of them that gets here can be shown
        code = ExitCode.USAGE if getattr(error, "exit_code", None) == _USAGE else ExitCode.ERROR
    except Exception:
        traceback.print_exc()
        code = ExitCode.BUG
    sys.exit(code or ExitCode.DONE)


def _pipe_closed() -> ExitCode:
    """Let nothing more be written: the interpreter would complain at its end about what nobody reads."""
    with suppress(OSError, ValueError):  # a test's standard output is none of the process
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.CLOSED_PIPE
