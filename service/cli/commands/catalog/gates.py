"""`ablate catalog gates`: the features that a spec can switch."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.markup import escape

from ablate.experiments.design.gate import GateValue, show
from ablate.experiments.design.gates import GATES
from ablate.experiments.design.listings import GatePublic, RecipePublic, public_gates, public_recipes
from ablate.experiments.design.packages import runs_programs
from ablate.experiments.design.problems import nearest
from ablate.experiments.design.recipes import RECIPES
from ablate.experiments.errors import SpecError, SpecProblem
from ablate.experiments.node_classes import NODE_CLASSES, is_gpu
from ablate.experiments.reporting.terminal.terminal_table import TerminalTable, texts
from ablate.experiments.reporting.terminal.terminal_table import names as named
from ablate.service.cli import completion
from ablate.service.cli.arguments import rows_named
from ablate.service.cli.commands.catalog.recipes import recipes_named
from ablate.service.cli.output import JsonOption, guarded, out, print_json

app = typer.Typer()


@app.command()
@guarded
def gates(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[GATE]...", help="Show only these gates.", autocompletion=completion.gates),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            "--on", help="Show only gates with a choice on this node class.", autocompletion=completion.node_classes
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="Show the values of this recipe only.", autocompletion=completion.recipes),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the features that a spec can switch: values, node classes, values of recipes, claims."""
    every = public_gates()
    classes = node_classes_of(every)
    rows = rows_named(names or (), every, unknown="unknown gate {!r}")
    if on is not None:
        rows = values_on(rows, on, classes)
    rows = with_recipes(rows, recipe, on)
    print_json(rows) if as_json else out().print(_table(rows, classes))


def _table(rows: Iterable[GatePublic], classes: Sequence[str]) -> RenderableType:
    table = TerminalTable(
        *named("gate"),
        *texts("values", "without it", "runs on"),
        *named("claim"),
        *texts("question"),
        leaving=("question", "claim", "runs on"),
    )
    for row in rows:
        values, where = ", ".join(map(show, row.values)), where_it_runs(row, classes)
        table.add_row(row.name, escape(values), value_in_recipes(row), escape(where), row.claim.value, row.question)
    return table


def values_on(rows: Iterable[GatePublic], node_class: str, classes: Sequence[str]) -> list[GatePublic]:
    """Return the gates with at least two values that `node_class` runs, and only those values.

    Raises SpecError for an unknown node class.
    """
    if node_class not in classes and not is_gpu(node_class):
        detail = f"unknown node class {node_class!r}; known: {', '.join(classes)}"
        raise SpecError([SpecProblem(pointer="--on", detail=detail, hint=nearest(node_class, classes))])
    narrowed = (row.model_copy(update=_values_on(row, node_class)) for row in rows)
    return [row for row in narrowed if len(row.values) > 1]


def _values_on(row: GatePublic, node_class: str) -> dict[str, object]:
    values = tuple(value for value in row.values if _runs(row, value, node_class))
    return {"values": values, "node_classes": {show(value): row.node_classes[show(value)] for value in values}}


def _runs(row: GatePublic, value: GateValue, node_class: str) -> bool:
    gate = GATES.get(row.name)
    if is_gpu(node_class) and gate is not None:
        return gate.runs_on(NODE_CLASSES[node_class], value)
    return _is_of(node_class, row.node_classes[show(value)])


def _is_of(node_class: str, classes: Collection[str]) -> bool:
    """Return whether a class is one of these, or a GPU where they are all classes of the table that run programs."""
    return node_class in classes or (is_gpu(node_class) and set(classes) >= set(filter(runs_programs, NODE_CLASSES)))


def with_recipes(rows: Iterable[GatePublic], recipe: str | None, node_class: str | None) -> list[GatePublic]:
    """Return gates with the values of one recipe, or of all recipes that `node_class` runs.

    Raises SpecError for a recipe that the node class does not run.
    """
    recipes = [
        row.name
        for row in recipes_named([] if recipe is None else [recipe], public_recipes())
        if _may_run(row, node_class)
    ]
    if not recipes:
        detail = f"recipe {recipe!r} is not meant for node class {node_class!r}; leave out --on to see its values"
        raise SpecError([SpecProblem(pointer="--recipe", detail=detail)])
    return [
        row.model_copy(update={"recipes": {n: v for n, v in row.recipes.items() if n in recipes and v in row.values}})
        for row in rows
        if not set(row.recipes).isdisjoint(recipes)
    ]


def _may_run(recipe: RecipePublic, node_class: str | None) -> bool:
    return node_class is None or not recipe.node_classes or _is_of(node_class, recipe.node_classes)


def node_classes_of(rows: Iterable[GatePublic]) -> list[str]:
    """Return all node classes that run any value of these gates."""
    return list(dict.fromkeys(name for row in rows for classes in row.node_classes.values() for name in classes))


def where_it_runs(row: GatePublic, classes: Sequence[str]) -> str:
    """Return the node classes that run a gate's values, for example "false: everywhere; true: h200"."""
    values_by_classes: dict[frozenset[str], list[str]] = {}
    for value, value_classes in row.node_classes.items():
        values_by_classes.setdefault(frozenset(value_classes), []).append(value)
    parts = [
        (", ".join(values), _class_list(value_classes, classes)) for value_classes, values in values_by_classes.items()
    ]
    return "; ".join(where if len(parts) == 1 else f"{values}: {where}" for values, where in parts)


def _class_list(subset: frozenset[str], classes: Sequence[str]) -> str:
    if subset >= set(classes):
        return "everywhere"
    return ", ".join(name for name in classes if name in subset) or "nothing yet"


def value_in_recipes(gate: GatePublic, write: Callable[[str], str] = str) -> str:
    """Return the gate's value in an arm that does not name it, for example "2: hybrid-tiny; 8: hybrid-ref-h200"."""
    recipes_by_value: dict[str, list[str]] = {}
    for recipe, value in gate.recipes.items():
        recipes_by_value.setdefault(write(show(value)), []).append(recipe)
    of_a_package = bool(gate.recipes) and set(gate.recipes).isdisjoint(RECIPES)
    if len(recipes_by_value) < 2 and not of_a_package:
        return next(iter(recipes_by_value), "must be named")
    return "; ".join(f"{value}: {', '.join(names)}" for value, names in recipes_by_value.items())
