"""Printing of commands: text or JSON on standard output, problems on standard error."""

import functools
import io
import json
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TextIO, TypeVar

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment

from ablate.experiments.errors import BundleError, ExperimentError, SpecError
from ablate.experiments.outcomes import ExitCode
from ablate.experiments.system.logs import UNSEEN, is_unicode, visible
from ablate.service.errors import ServiceError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ablate.service.schemas.problems import Problem
    from ablate.service.schemas.tokens import TokenSecret

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
StreamOption = Annotated[bool, typer.Option("--json", help="Print one JSON object per line for every event.")]

_FILE_WIDTH = 160
"""Columns of tables that go to a file or a pipe."""
_NOTEBOOK_WIDTH = 120
_PRE = '<pre style="white-space: pre; overflow-x: auto; line-height: normal">{code}</pre>'
_WORKER_HINT = "set it on the worker as ABLATE_WORKER_TOKEN, with ABLATE_NODE_NAME={}"

_P = ParamSpec("_P")
_T = TypeVar("_T")


def out() -> Console:
    """Return the console for results: standard output, unwrapped if it is a file or a pipe."""
    return _console(sys.stdout)


def err() -> Console:
    """Return the console for problems and remarks: standard error."""
    return _console(sys.stderr)


class _SafeConsole(Console):
    """A console that lets no control character of the printed text reach the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of `renderable`, with symbols in place of control characters in the text."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)


def _console(stream: TextIO, *, is_file: bool = False) -> Console:
    on_terminal = stream.isatty()
    width = None if on_terminal else _FILE_WIDTH
    forced = False if is_file else None
    return _SafeConsole(
        file=stream,
        soft_wrap=not on_terminal,
        highlight=False,
        width=width,
        force_jupyter=forced,
        force_terminal=forced,
    )


def plain_text(*parts: RenderableType, width: int = _FILE_WIDTH) -> str:
    """Return what a file of this width would get of these, line by line."""
    file = io.StringIO()
    console = _console(file, is_file=True)
    console.width = width
    console.print(*parts, sep="\n", end="")
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def html(*parts: RenderableType) -> str:
    """Return these as they look on a terminal, as HTML for a notebook."""
    console = _SafeConsole(file=io.StringIO(), record=True, width=_NOTEBOOK_WIDTH, highlight=False, force_jupyter=False)
    console.print(*parts, sep="\n", end="")
    return console.export_html(inline_styles=True, code_format=_PRE)


def print_text(text: str) -> None:
    """Print text from a service, a bundle or a trial, with symbols in place of control characters."""
    typer.echo(visible(text), nl=False)


def print_json(value: "BaseModel | Iterable[BaseModel] | dict[str, Any] | list[Any]") -> None:
    """Print a model, several models, or plain values as one JSON document."""
    sys.stdout.write(_escape_unseen(_json(_plain(value), indent=2)) + "\n")


def print_json_list(name: str, items: "Iterable[BaseModel]", **head: "BaseModel") -> None:
    """Print one JSON document with the values of `head` and, as its last value, a list, item by item.

    It needs little memory for a list of any length.
    """
    opened = _json(_plain({**head, name: []}), indent=2).removesuffix("[]\n}")
    sys.stdout.write(_escape_unseen(opened) + "[")
    separator = "\n    "
    for item in items:
        text = _json(_plain(item), indent=2).replace("\n", "\n    ")
        sys.stdout.write(separator + _escape_unseen(text))
        separator = ",\n    "
    sys.stdout.write("]\n}\n" if separator.startswith("\n") else "\n  ]\n}\n")


def print_json_line(**value: "BaseModel") -> None:
    """Print one line of a stream: a JSON object whose only key names the type of its value."""
    sys.stdout.write(_escape_unseen(_json(_plain(value))) + "\n")
    sys.stdout.flush()


def print_secret(secret: "TokenSecret", *, as_json: bool) -> None:
    """Print a new secret alone on standard output, and its use on standard error."""
    if as_json:
        print_json(secret)
        return
    use = "set it as ABLATE_TOKEN" if secret.node is None else _WORKER_HINT.format(escape(secret.node))
    err().print(f"secret of [bold]{escape(secret.name)}[/], shown only once; {use}:")
    typer.echo(secret.secret)


def _json(value: Any, *, indent: int | None = None) -> str:
    """Return a JSON document that standard output can encode."""
    return json.dumps(value, indent=indent, ensure_ascii=not is_unicode(sys.stdout))


def _escape_unseen(document: str) -> str:
    """Write control characters of a JSON document as JSON escapes; its meaning stays the same."""
    return UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", document)


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
    """Turn errors that a user can cause into a readable problem and exit code 5. Other exceptions pass through."""

    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return command(*args, **kwargs)
        except BrokenPipeError:  # the reader of our output has closed it, so the program ends quietly
            raise
        except Exception as error:
            from ablate.service.client.connection import ClientError

            if not isinstance(error, ClientError | ExperimentError | ServiceError | OSError):
                raise
            show_problem(problem_of(error), as_json=bool(kwargs.get("as_json")))
            raise typer.Exit(ExitCode.ERROR) from error

    return run


def problem_of(error: Exception) -> "Problem":
    """Return an error as a problem document."""
    from ablate.service.client.connection import ClientError
    from ablate.service.schemas.problems import Problem, ProblemDetail

    if isinstance(error, ClientError):
        return error.problem
    if isinstance(error, SpecError | BundleError):
        title = "The spec is not acceptable" if isinstance(error, SpecError) else "The bundle is not acceptable"
        return Problem(title=title, errors=tuple(ProblemDetail.of(problem) for problem in error.problems))
    return Problem(title="Error", detail=str(error))


def show_problem(problem: "Problem", *, as_json: bool = False) -> None:
    """Print a problem document to standard error, as a readable list or as JSON."""
    if as_json:
        document = problem.model_dump(mode="json", exclude_none=True, exclude_unset=True)
        sys.stderr.write(_escape_unseen(json.dumps(document, indent=2, ensure_ascii=not is_unicode(sys.stderr))) + "\n")
        return
    console = err()
    for line in problem_lines(problem):
        console.print(line)


def problem_lines(problem: "Problem") -> list[str]:
    """Return a problem document as lines of rich markup: title, entries with pointer and hint, request id."""
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
