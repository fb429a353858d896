"""`ablate gates`: what can be switched."""

from collections.abc import Iterable, Sequence
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.markup import escape

from experiments.design.gate import GatePublic, show
from experiments.design.gates import catalogue
from experiments.design.problems import nearest
from experiments.errors import SpecError, SpecProblem
from experiments.reporting.terminal_table import TerminalTable, texts
from experiments.reporting.terminal_table import names as named
from service.cli import completion, gates_page
from service.cli.output import JsonOption, guarded, out, print_json
from service.client import Client

app = typer.Typer()


@app.command()
@guarded
def gates(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[GATE]...", help="Only these.", autocompletion=completion.gates),
    ] = None,
    as_json: JsonOption = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print this program's gates as docs/gates.md.")] = False,
) -> None:
    """Show what can be switched: values, defaults, claims."""
    if markdown:
        typer.echo(gates_page.render(catalogue()), nl=False)
        return
    with Client() as client:
        rows = chosen_gates(client.gates(), names or ())
    print_json(rows) if as_json else out().print(_table(rows))


def _table(rows: Iterable[GatePublic]) -> RenderableType:
    """Show the gates."""
    made = TerminalTable(*named("gate", "claim"), *texts("values (default first)", "question"))
    for row in rows:
        others = [show(value) for value in row.values if value != row.default]
        values = ", ".join([f"[bold]{escape(show(row.default))}[/]", *map(escape, others)])
        made.add_row(row.name, row.claim.value, values, row.question)
    return made


def chosen_gates(rows: Sequence[GatePublic], names: Sequence[str]) -> list[GatePublic]:
    """Return the gates of these names, all without any. Raises SpecError with what is meant for one that is none."""
    known = [row.name for row in rows]
    wrong = [
        SpecProblem(pointer=name, detail=f"unknown gate {name!r}", hint=nearest(name, known))
        for name in names
        if name not in known
    ]
    if wrong:
        raise SpecError(wrong)
    return [row for row in rows if not names or row.name in names]
