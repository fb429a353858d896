"""The `ablate` program: the command groups that the layers declare as entry points.

A command is imported only when it is asked for, and ends the process with our exit codes. A group whose packages are
not installed (a GPU node has no API) stays listed and names the missing package. It does not break the other groups.
"""

import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, distribution, requires, version
from keyword import iskeyword
from types import ModuleType
from typing import Annotated, Any, ClassVar, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from ablate.experiments.outcomes import ExitCode
from ablate.experiments.system.logs import accept_every_text

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


def commands_in(package: ModuleType, groups: Mapping[str, str] | None = None) -> type[CommandGroup]:
    """Return the group of a package's commands.

    Each command is a module of the command's name, with its Typer application as `app`. Each of `groups` is a package
    of such modules, with its help.
    """
    return type("Folder", (CommandFolder,), {"package": package, "groups": groups or {}})


class CommandFolder(CommandGroup):
    """The commands of one package. It imports a module when its command is asked for."""

    package: ClassVar[ModuleType]
    groups: ClassVar[Mapping[str, str]] = {}

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # Typer's own class is private
        """Return the names of all commands."""
        modules = {module.name.rstrip("_").replace("_", "-") for module in pkgutil.iter_modules(self.package.__path__)}
        return sorted(modules | set(self.commands))

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        """Return the command of this name, or None if it has no module."""
        if cmd_name not in self.commands and cmd_name in self.list_commands(ctx):
            group = load_group(cmd_name, lambda: self._app(cmd_name))
            self.commands[cmd_name] = group if group.name else group.commands[cmd_name]
        return self.commands.get(cmd_name)

    def _app(self, name: str) -> typer.Typer:
        file = f"{name}_" if iskeyword(name) else name.replace("-", "_")
        module = import_module(f"{self.package.__name__}.{file}")
        if name in self.groups:
            return typer.Typer(name=name, cls=commands_in(module), help=self.groups[name], no_args_is_help=True)
        app: typer.Typer = module.app
        return app


def load_group(name: str, load: Callable[[], typer.Typer]) -> Any:
    """Return the group that `load` imports, or a command `name` that says which package is missing."""
    try:
        app = load()
    except ModuleNotFoundError as error:
        app = _placeholder(name, error.name or str(error))
    return get_group(app)


def _placeholder(name: str, package: str) -> typer.Typer:
    sentence = f"The {name} commands are not available here: package '{package}' is not installed"
    extras = re.findall(
        rf'^{re.escape(package)}\b.*extra == "([^"]+)"', "\n".join(requires("ablate") or ()), re.MULTILINE
    )
    sentence += f"; install ablate with the extra '{extras[0]}'." if extras else "."
    app = typer.Typer()

    @app.command(name, help=sentence, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
    def unavailable() -> None:
        sys.stderr.write(sentence + "\n")
        raise typer.Exit(ExitCode.ERROR)

    return app


def _run_and_exit(run: Callable[..., Any], *arguments: Any, **options: Any) -> NoReturn:
    """Run a Typer command and end the process with the matching `ExitCode`."""
    accept_every_text()
    try:
        code = run(*arguments, **{**options, "standalone_mode": False})
        code = _flush(reported=code == ExitCode.ERROR) or code
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


def _flush(*, reported: bool) -> ExitCode | None:
    """Write the rest of the output. Return ERROR if that fails, for example on a full disk, which may be `reported`."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _silence_output()
        if not reported:
            sys.stderr.write(f"error: the output cannot be written: {error.strerror}\n")
        return ExitCode.ERROR
    return None


def _silence_output() -> ExitCode:
    """Discard further output: the interpreter would otherwise report the closed pipe when it exits."""
    with suppress(OSError, ValueError):  # a test's standard output has no file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.CLOSED_PIPE


GROUP = "ablate.commands"

PANELS: Mapping[str, tuple[str, ...]] = {
    "Ask": (
        *("ask", "demo", "init", "check", "plan", "run", "sessions", "try", "bisect", "nightly", "pull-request", "aa"),
        *("cancel", "catalog"),
    ),
    "See": ("list", "show", "watch", "verdict", "log", "history", "open"),
    "Share": ("report", "share"),
    "Run a service": ("up", "down", "status", "worker", "nodes", "fleet", "admin", "mcp"),
    "Without a service": ("offline",),
}
"""Commands in the order of the program's help, by subject."""

MOVED = {
    "submit": "ablate run SPEC --detach",
    "calibration": "ablate nodes calibration",
    "exec": "ablate offline exec",
    "import": "ablate offline import",
    "assess": "ablate offline assess",
    "receipts": "ablate offline receipts, verify or trace",
    **{name: f"ablate catalog {name}" for name in ("gates", "recipes", "schema")},
    **{
        name: f"ablate admin {name}"
        for name in ("backup", "keys", "mlflow", "notifications", "priority", "restore", "tokens")
    },
}
"""Commands of release 0.1 and what to type now."""

_HELP = (
    "Is a change to the training stack better, by how much, and can you trust the answer? "
    "Start with `ablate ask` beside your own program, or with `ablate demo`. "
    f"Exit codes: 0 success, 1 to 4 a decision, {ExitCode.ERROR} an error, "
    f"{ExitCode.UNMET} a failed check, {ExitCode.USAGE} wrong usage. docs/ci.md lists all of them."
)


def main() -> None:
    """Run the program with the arguments of this process."""
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]  # httpx's own command: a fifth of our start
    build(distribution("ablate").entry_points.select(group=GROUP))(prog_name="ablate")


def build(groups: Iterable[EntryPoint]) -> typer.Typer:
    """Return the program made of these groups.

    A group with a name becomes a sub-command; the commands of the other groups appear at the top level. The entry
    `GROUP.COMMAND` adds its command to that group.
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
    advice: ClassVar[Mapping[str, str]] = {name: f"It is now: {words}" for name, words in MOVED.items()}

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # Typer's own class is private
        """Return the names of all commands in the order of `PANELS`."""
        groups = [_group(entry) for entry in self.entries if "." not in entry.name]
        names = [name for group in groups for name in ([group.name] if group.name else group.list_commands(ctx))]
        order = [name for panel in PANELS.values() for name in panel]
        return sorted(names, key=lambda name: order.index(name) if name in order else len(order))

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        """Return the command of this name, or None."""
        whole = [entry for entry in self.entries if "." not in entry.name]
        for entry in sorted(whole, key=lambda entry: entry.name != cmd_name):
            group = _group(entry)
            command = group if group.name == cmd_name else None if group.name else group.get_command(ctx, cmd_name)
            if command is not None:
                return self._completed(ctx, command, cmd_name)
        return None

    def _completed(self, ctx: typer.Context, command: Any, name: str) -> Any:
        """Return a command in its panel, a group with the commands that other entries add to it."""
        command.rich_help_panel = next((panel for panel, names in PANELS.items() if name in names), None)
        for entry in self.entries:
            group_name, _, own = entry.name.partition(".")
            if own and group_name == name:
                command.add_command(_group(entry).get_command(ctx, own), own)
        return command


@cache
def _group(entry: EntryPoint) -> Any:
    return load_group(entry.name.rpartition(".")[2], entry.load)


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
