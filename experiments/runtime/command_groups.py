"""Typer groups that import a command only when it is asked for, and end the process with our exit codes."""

import ast
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from experiments.outcomes import ExitCode

_TYPER_USAGE = 2
"""Typer's code for wrong usage. Here 2 is the code of a decision."""


class SingleCommand(TyperCommand):
    """A program that is one command."""

    def main(self, *arguments: Any, **options: Any) -> NoReturn:
        """Run the command and end the process with an `ExitCode`."""
        _run_and_exit(super().main, *arguments, **options)


class CommandGroup(TyperGroup):
    """A program, or a part of one, with several commands."""

    advice: ClassVar[Mapping[str, str]] = {}
    """What to do instead, by words that users try although they are not commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first word names. Fails with advice, or with the nearest names."""
        if args[0] in self.advice:
            ctx.fail(f"No such command '{args[0]}'. {self.advice[args[0]]}")
        return super().resolve_command(ctx, args)

    def main(self, *arguments: Any, **options: Any) -> NoReturn:
        """Run a command and end the process with an `ExitCode`."""
        _run_and_exit(super().main, *arguments, **options)


def commands_in(package: ModuleType) -> type[CommandGroup]:
    """Return the group of a package's commands.

    Each command is a module of the command's name, with its Typer application as `app`.
    """
    return type("Folder", (CommandFolder,), {"package": package})


class CommandFolder(CommandGroup):
    """The commands of one package. It imports a module when its command is asked for."""

    package: ClassVar[ModuleType]

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # Typer's own class is private
        """Return the names of all commands."""
        return [module.rstrip("_").replace("_", "-") for module in self._modules()]

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        """Return the command of this name, or None if it has no module."""
        if cmd_name not in self.commands and cmd_name in self.list_commands(ctx):
            module = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name.replace("-", "_")
            group = get_group(import_module(f"{self.package.__name__}.{module}").app)
            self.commands[cmd_name] = group if group.name else group.commands[cmd_name]
        return self.commands.get(cmd_name)

    def outlines(self) -> dict[str, TyperCommand]:
        """Return name and help of every command, without importing any."""
        return {
            name: outline
            for module in self._modules()
            for name, outline in outlines(f"{self.package.__name__}.{module}").items()
        }

    def _modules(self) -> list[str]:
        return sorted(module.name for module in pkgutil.iter_modules(self.package.__path__))


def outlines(module: str) -> dict[str, TyperCommand]:
    """Return name and help of a module's commands, read from its source; empty if there is no source."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # its package is not installed
        spec = None
    if spec is None or spec.origin is None:
        return {}
    helps = _declared_helps(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
    return {name: TyperCommand(name, help=inspect.cleandoc(text)) for name, text in helps.items()}


def _declared_helps(tree: ast.Module) -> dict[str, str]:
    """Return the help by name: of the group if the module names one, otherwise of every command."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _is_name(node.targets[0], "app"):
            arguments = _text_arguments(node.value)
            if "name" in arguments:
                return {arguments["name"]: arguments.get("help", "")}
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return dict(command for function in functions for command in _commands(function))


def _commands(function: ast.FunctionDef) -> list[tuple[str, str]]:
    name, help_text = function.name.rstrip("_").replace("_", "-"), ast.get_docstring(function) or ""
    decorators = [
        _text_arguments(call)
        for call in function.decorator_list
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and _is_name(call.func.value, "app")
        and call.func.attr == "command"
    ]
    return [(arguments.get("name", name), arguments.get("help", help_text)) for arguments in decorators]


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _text_arguments(call: ast.Call) -> dict[str, str]:
    """Return a call's arguments that are string literals. The first positional one is a command's name."""
    arguments = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    if call.args:
        arguments["name"] = call.args[0]
    constants = {name: value.value for name, value in arguments.items() if isinstance(value, ast.Constant)}
    return {name: value for name, value in constants.items() if isinstance(value, str)}


def _run_and_exit(run: Callable[..., Any], *arguments: Any, **options: Any) -> NoReturn:
    """Run a Typer command and end the process with the matching `ExitCode`."""
    try:
        code = run(*arguments, **{**options, "standalone_mode": False})
        sys.stdout.flush()
    except BrokenPipeError:
        code = _silence_output()
    except SystemExit as exit_request:
        code = _silence_output() if isinstance(exit_request.__context__, BrokenPipeError) else exit_request.code
    except typer.Abort:
        code = ExitCode.DETACHED
    except typer.TyperException as error:
        from typer import rich_utils  # its import takes a third of the program's start

        rich_utils.rich_format_error(error)  # type: ignore[arg-type]  # every exception that gets here can be shown
        code = ExitCode.USAGE if getattr(error, "exit_code", None) == _TYPER_USAGE else ExitCode.ERROR
    except Exception:
        traceback.print_exc()
        code = ExitCode.BUG
    sys.exit(code or ExitCode.DONE)


def _silence_output() -> ExitCode:
    """Discard further output: the interpreter would otherwise report the closed pipe when it exits."""
    with suppress(OSError, ValueError):  # a test's standard output has no file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.CLOSED_PIPE
