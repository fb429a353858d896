"""How commands print: people's text or programs' JSON on standard output, problems on standard error."""

import functools
import json
import re
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TextIO, TypeVar

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment

from experiments.errors import BundleError, ExperimentError, SpecError
from experiments.outcomes import ExitCode
from experiments.runtime.logs import UNSEEN, visible
from service.errors import ServiceError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from service.schemas.problems import Problem

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document, for programs.")]
StreamOption = Annotated[
    bool, typer.Option("--json", help="Print JSON for programs, a line for everything that happens.")
]

_WIDTH_OF_FILES = 160
"""Columns of tables that go to a file or a pipe."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


def out() -> Console:
    """Return the console of results: standard output; wide and unwrapped when that is a file or a pipe."""
    return _console(sys.stdout)


def err() -> Console:
    """Return the console of problems and remarks: standard error."""
    return _console(sys.stderr)


class _HarmlessConsole(Console):
    """A console whose text steers no terminal: only what this program itself asks for does."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the pieces of `renderable`, with control characters in their text shown as pictures."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)


def _console(stream: TextIO) -> Console:
    on_terminal = stream.isatty()
    return _HarmlessConsole(
        file=stream, soft_wrap=not on_terminal, highlight=False, width=None if on_terminal else _WIDTH_OF_FILES
    )


def print_text(text: str) -> None:
    """Print text from a service, a bundle or a trial as it is, but for what would steer a terminal."""
    typer.echo(visible(text), nl=False)


def print_json(value: "BaseModel | Iterable[BaseModel] | dict[str, Any] | list[Any]") -> None:
    """Print a model, models, or plain values as one JSON document."""
    sys.stdout.write(_json_text(json.dumps(_plain(value), indent=2, ensure_ascii=False)) + "\n")


def print_json_line(**value: "BaseModel") -> None:
    """Print one line of a stream: a JSON object whose only key says what its value is."""
    sys.stdout.write(_json_text(json.dumps(_plain(value), ensure_ascii=False)) + "\n")
    sys.stdout.flush()


def _json_text(document: str) -> str:
    """Write signs that steer a terminal as JSON escapes; the document means the same."""
    return UNSEEN.sub(_escaped, document)


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def _plain(value: Any) -> Any:
    from pydantic import BaseModel

    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return [_plain(item) for item in value]


def guarded(command: Callable[_P, _T]) -> Callable[_P, _T]:
    """Turn what a user can cause into a readable problem and exit code 5; anything else is our bug and stays loud."""

    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return command(*args, **kwargs)
        except BrokenPipeError:  # whoever read our output left; the program ends quietly
            raise
        except Exception as error:
            if not isinstance(error, _told()):
                raise
            show_problem(problem_of(error), as_json=bool(kwargs.get("as_json")))
            raise typer.Exit(ExitCode.ERROR) from error

    return run


def _told() -> tuple[type[Exception], ...]:
    """Return what a user can cause."""
    from service.client.connection import ClientError

    return (ClientError, ExperimentError, ServiceError, OSError)


def problem_of(error: Exception) -> "Problem":
    """Describe an error as a problem document."""
    from service.client.connection import ClientError
    from service.schemas.problems import Problem, ProblemDetail

    if isinstance(error, ClientError):
        return error.problem
    if isinstance(error, SpecError | BundleError):
        title = "The spec is not acceptable" if isinstance(error, SpecError) else "The bundle is damaged or was altered"
        return Problem(title=title, errors=tuple(ProblemDetail.of(problem) for problem in error.problems))
    return Problem(title="Error", detail=str(error))


def show_problem(problem: "Problem", *, as_json: bool = False) -> None:
    """Print a problem document to standard error: a list that reads well, or the document itself."""
    if as_json:
        document = problem.model_dump_json(indent=2, exclude_none=True, exclude_unset=True)
        sys.stderr.write(_json_text(document) + "\n")
        return
    console = err()
    for line in problem_lines(problem):
        console.print(line)


def problem_lines(problem: "Problem") -> list[str]:
    """Return a problem document as lines of rich markup: title, every entry with pointer and hint, request id."""
    status = f" ({problem.status})" if problem.status else ""
    lines = [f"[bold red]{escape(problem.title)}[/]{status}"]
    if problem.detail and not problem.errors:
        lines = [f"[bold red]error:[/] {escape(problem.detail)}"]
    for entry in problem.errors:
        lines.append(f"  [bold]{escape(entry.pointer or '#')}[/]  {escape(entry.detail)}")
        if entry.hint:
            lines.append(f"      [cyan]hint:[/] {escape(entry.hint)}")
    if problem.request_id:
        lines.append(f"  [dim]request {escape(problem.request_id)}[/]")
    return lines
