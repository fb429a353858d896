"""`ablate gates`: what can be switched."""

from collections.abc import Iterable, Sequence
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.markup import escape

from experiments.design.gate import GatePublic, GateValue, show
from experiments.design.gates import catalogue
from experiments.design.problems import nearest
from experiments.design.recipe_values import RecipePublic, recipe_values
from experiments.errors import SpecError, SpecProblem
from experiments.reporting.terminal.terminal_table import TerminalTable, texts
from experiments.reporting.terminal.terminal_table import names as named
from service.cli import completion, gates_page
from service.cli.commands.recipes import chosen_recipes
from service.cli.names import chosen
from service.cli.output import JsonOption, guarded, out, print_json
from service.client.api import Client

app = typer.Typer()


@app.command()
@guarded
def gates(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[GATE]...", help="Only these.", autocompletion=completion.gates),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            "--on", help="Only what can be switched on this node class.", autocompletion=completion.node_classes
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="With the values that this recipe has.", autocompletion=completion.recipes),
    ] = None,
    as_json: JsonOption = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print this program's gates as docs/gates.md.")] = False,
) -> None:
    """Show what can be switched: values, where each runs, what recipes have, claims."""
    if markdown:
        typer.echo(gates_page.render(catalogue()), nl=False)
        return
    with Client() as client:
        every = client.gates()
    rows = chosen_gates(every, names or ())
    if on is not None:
        rows = values_on(rows, on, known_classes(every))
    rows = with_recipes(rows, recipe, on)
    print_json(rows) if as_json else out().print(_table(rows, known_classes(every)))


def _table(rows: Iterable[GatePublic], classes: Sequence[str]) -> RenderableType:
    """Show the gates."""
    made = TerminalTable(
        *named("gate"),
        *texts("values", "without it", "runs on"),
        *named("claim"),
        *texts("question"),
        leaving=("question", "claim", "runs on"),
    )
    for row in rows:
        values, where = ", ".join(map(show, row.values)), where_it_runs(row, classes)
        made.add_row(row.name, escape(values), gates_page.in_recipes(row), escape(where), row.claim.value, row.question)
    return made


def with_recipes(rows: Iterable[GatePublic], recipe: str | None, node_class: str | None) -> list[GatePublic]:
    """Return gates with the values of one recipe, or of those that `node_class` runs. Raises SpecError."""
    asked = [] if recipe is None else [recipe]
    kept = [one.name for one in chosen_recipes(recipe_values(), asked) if _may_run(one, node_class)]
    if not kept:
        detail = f"recipe {recipe!r} is not meant for node class {node_class!r}; without --on, its values are shown"
        raise SpecError([SpecProblem(pointer="--recipe", detail=detail)])
    return [row.model_copy(update={"recipes": _that_run(row, kept)}) for row in rows]


def _that_run(row: GatePublic, recipes: Iterable[str]) -> dict[str, GateValue]:
    """Return the values of recipes that are among those that are shown."""
    return {name: row.recipes[name] for name in recipes if row.recipes[name] in row.values}


def _may_run(recipe: RecipePublic, node_class: str | None) -> bool:
    return node_class is None or not recipe.node_classes or node_class in recipe.node_classes


def known_classes(rows: Iterable[GatePublic]) -> list[str]:
    """Return all node classes that a value runs on."""
    return list(dict.fromkeys(name for row in rows for able in row.node_classes.values() for name in able))


def where_it_runs(row: GatePublic, classes: Sequence[str]) -> str:
    """Say which node classes run a gate's values, for example "false: everywhere; true: h200"."""
    groups: dict[frozenset[str], list[str]] = {}
    for value, able in row.node_classes.items():
        groups.setdefault(frozenset(able), []).append(value)
    told = {tuple(values): _where(able, classes) for able, values in groups.items()}
    return "; ".join(where if len(told) == 1 else f"{', '.join(values)}: {where}" for values, where in told.items())


def _where(able: frozenset[str], classes: Sequence[str]) -> str:
    if able >= set(classes):
        return "everywhere"
    return ", ".join(name for name in classes if name in able) or "nothing yet"


def values_on(rows: Iterable[GatePublic], node_class: str, known: Sequence[str]) -> list[GatePublic]:
    """Return gates with the values that `node_class` runs, if there are two to switch between. Raises SpecError."""
    if node_class not in known:
        detail = f"unknown node class {node_class!r}; known: {', '.join(known)}"
        raise SpecError([SpecProblem(pointer="--on", detail=detail, hint=nearest(node_class, known))])
    kept = (row.model_copy(update=_only(row, node_class)) for row in rows)
    return [row for row in kept if len(row.values) > 1]


def _only(row: GatePublic, node_class: str) -> dict[str, object]:
    able = tuple(value for value in row.values if node_class in row.node_classes[show(value)])
    return {"values": able, "node_classes": {show(value): row.node_classes[show(value)] for value in able}}


def chosen_gates(rows: Sequence[GatePublic], names: Sequence[str]) -> list[GatePublic]:
    """Return the gates of these names, all without any. Raises SpecError with what is meant for one that is none."""
    return chosen(rows, names, unknown="unknown gate {!r}")
