"""`ablate sessions`: open, list, show and close sessions, in which `ablate try` proposes changes."""

from typing import Annotated

import typer

from ablate.experiments.errors import SpecError, SpecProblem
from ablate.service.cli import completion, tables
from ablate.service.cli.arguments import SpecArgument, read_spec
from ablate.service.cli.output import JsonOption, guarded, out, print_json, print_text
from ablate.service.client.api import Client

app = typer.Typer(name="sessions", help="Sessions: many proposals under one error budget.", no_args_is_help=True)

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="The session's name.", autocompletion=completion.sessions)
]
NewNameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the new session.")]


@app.command("open")
@guarded
def open_(name: NewNameArgument, spec: SpecArgument, as_json: JsonOption = False) -> None:
    """Open a session whose incumbent is the baseline of a spec. Nothing runs, and its variants are not proposed."""
    with Client() as client:
        session = client.sessions.open(name, read_spec(spec))
    print_json(session) if as_json else out().print(tables.session(session))


@app.command("list")
@guarded
def list_(as_json: JsonOption = False) -> None:
    """List all sessions, newest first."""
    with Client() as client:
        sessions = client.sessions.list()
    print_json(sessions) if as_json else out().print(tables.sessions(sessions))


@app.command()
@guarded
def show(name: NameArgument, as_json: JsonOption = False) -> None:
    """Show a session with all its proposals, their levels and answers."""
    with Client() as client:
        session = client.sessions.get(name)
    print_json(session) if as_json else out().print(tables.session(session))


@app.command()
@guarded
def spec(
    name: NameArgument,
    whole: Annotated[
        bool,
        typer.Option("--whole", help="Compare it with the first baseline: what all kept ones gained together."),
    ] = False,
) -> None:
    """Print the incumbent's spec. Change its variant, and propose the file: ablate try --session NAME -- FILE."""
    with Client() as client:
        session = client.sessions.get(name)
    text = session.whole if whole else session.spec
    if text is None:
        detail = f"session '{name}' has kept no proposal, so its incumbent is the first baseline"
        raise SpecError([SpecProblem(pointer="--whole", detail=detail, hint="leave --whole out")])
    print_text(text)


@app.command()
@guarded
def close(name: NameArgument, as_json: JsonOption = False) -> None:
    """Close a session. It takes no more proposals; a running one ends by itself."""
    with Client() as client:
        session = client.sessions.close(name)
    print_json(session) if as_json else out().print(tables.session(session))
