"""How our programs end: with an exit code that has one meaning, and quietly where the reader of their output left."""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from experiments.outcomes import ExitCode

_USAGE = 2
"""Typer's own code for wrong usage, which is that of a decision here."""


class OneCommand(TyperCommand):
    """A program that is one command."""

    def main(self, *arguments: Any, **options: Any) -> NoReturn:
        """Run it and end the process with an `ExitCode`."""
        end_with(super().main, *arguments, **options)


class ManyCommands(TyperGroup):
    """A program of many commands."""

    def main(self, *arguments: Any, **options: Any) -> NoReturn:
        """Run one of them and end the process with an `ExitCode`."""
        end_with(super().main, *arguments, **options)


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
