"""`ablate sessions`: open, list, show and close sessions, in which `ablate try` proposes changes."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.markup import escape

from ablate.experiments.errors import SpecError, SpecProblem
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.terminal.terminal_table import TerminalTable, ids, names, numbers, texts
from ablate.service.cli import completion, tables
from ablate.service.cli.arguments import SpecArgument, read_spec
from ablate.service.cli.output import JsonOption, guarded, out, print_json, print_text
from ablate.service.client.api import Client

if TYPE_CHECKING:
    from ablate.service.schemas.sessions import SessionPath, SessionPublic

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
    print_json(session) if as_json else out().print(_session(session))


@app.command("list")
@guarded
def list_(as_json: JsonOption = False) -> None:
    """List all sessions, newest first."""
    with Client() as client:
        sessions = client.sessions.list()
    print_json(sessions) if as_json else out().print(_table(sessions))


@app.command()
@guarded
def show(name: NameArgument, as_json: JsonOption = False) -> None:
    """Show a session with all its proposals, their levels and answers."""
    with Client() as client:
        session = client.sessions.get(name)
    print_json(session) if as_json else out().print(_session(session))


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
    print_json(session) if as_json else out().print(_session(session))


def _table(sessions: "list[SessionPublic]") -> RenderableType:
    table = TerminalTable(*names("session", "state"), *numbers("proposals", "kept"), *texts("next level", "metric"),
                          *names("node class", "opened by", "opened"), leaving=("opened by", "opened"))  # fmt: skip
    for one in sessions:
        level = f"{100 * one.next_level:.2g} %"
        opened = wording.moment(one.created_at)
        counts = (f"{one.proposals:,}", f"{one.kept:,}")
        table.add_row(escape(one.name), one.state, *counts, level, one.metric, one.node_class, one.opened_by, opened)
    return table if table.rows else "No session yet. Open one: ablate sessions open NAME SPEC"


def _session(session: "SessionPath") -> RenderableType:
    incumbent = f"proposal {session.incumbent}" if session.incumbent else "the baseline that opened it"
    pairs = tables.facts(
        ("session", f"[bold]{escape(session.name)}[/], {session.state}, opened by {escape(session.opened_by)}"),
        ("decides", f"{session.metric} on node class {session.node_class}"),
        ("incumbent", f"{incumbent}; its spec: ablate sessions spec {escape(session.name)}"),
        ("kept", f"{session.kept:,} of {wording.counted(session.proposals, 'proposal')}"),
        ("next level", f"{100 * session.next_level:.2g} %"),
        *([("advice", f"[yellow]{escape(session.advice)}[/]")] if session.advice else []),
    )
    table = TerminalTable(*numbers("proposal"), *names("outcome"), *numbers("level"), *texts("answer", "note"),
                          *names("name"), *ids("ablation"), leaving=("ablation", "name"))  # fmt: skip
    for one in session.path:
        level = f"{100 * one.level:.2g} %"
        outcome, answer, note = one.outcome or f"({one.state})", escape(one.answer or ""), escape(one.note or "")
        table.add_row(str(one.number), str(outcome), level, answer, note, escape(one.name), one.ablation_id)
    return Group(pairs, table) if session.path else Group(pairs)
