"""`ablate recipes`: what can be trained, and what an arm has that names nothing."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.markup import escape

from experiments.design.gate import show
from experiments.design.recipe_values import RecipePublic, recipe_values
from experiments.reporting.terminal.terminal_table import TerminalTable, numbers, texts
from experiments.reporting.terminal.terminal_table import names as named
from kernels.backends import NODE_CLASSES, Lane
from service.cli import completion
from service.cli.names import chosen
from service.cli.output import JsonOption, guarded, out, print_json

app = typer.Typer()


@app.command()
@guarded
def recipes(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE]...", help="All values of these.", autocompletion=completion.recipes),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what can be trained: this program's recipes, a line each; of a named one sizes, gates and overrides."""
    rows = chosen_recipes(recipe_values(), names or ())
    if as_json:
        print_json(rows)
    elif not names:
        out().print(_table(rows))
    else:
        for row in rows:
            _show(row)


def chosen_recipes(rows: Sequence[RecipePublic], names: Sequence[str]) -> list[RecipePublic]:
    """Return the recipes of these names, all without any. Raises SpecError with what is meant for one that is none."""
    known = ", ".join(row.name for row in rows)
    return chosen(rows, names, unknown=f"unknown recipe {{!r}}; known: {known}")


def layers(row: RecipePublic) -> str:
    """Say which blocks a model has, for example "2 x Mamba-3 MIMO mixer, 1 x gated MLP"."""
    return ", ".join(f"{count} x {kind}" for kind, count in row.sizes.layers.items() if count)


def meant_for(row: RecipePublic) -> str:
    """Name the node classes that a recipe is meant for, and where an arm must name its lane."""
    lane = Lane(str(row.gates["lane"]))
    elsewhere = [] if row.node_classes else [name for name, entry in NODE_CLASSES.items() if lane not in entry.lanes]
    return f"{', '.join(row.node_classes) or 'any'}{'; with gate lane on ' if elsewhere else ''}{', '.join(elsewhere)}"


def _table(rows: Iterable[RecipePublic]) -> RenderableType:
    table = TerminalTable(
        *named("recipe"),
        *texts("runs on"),
        *numbers("parameters", "tokens a step"),
        *texts("what it is"),
        leaving=("what it is",),
    )
    for row in rows:
        sizes = row.sizes
        table.add_row(row.name, meant_for(row), f"{sizes.parameters:,}", f"{sizes.tokens_per_step:,}", row.summary)
    return table


def _show(row: RecipePublic) -> None:
    """Print a recipe's values, a line each; numbers are written as a spec writes them."""
    console = out()
    console.print(f"[bold]{row.name}[/] version {row.version}, runs on {meant_for(row)}\n{escape(row.summary)}")
    for title, values in _parts(row):
        table = TerminalTable(*named(title), *texts("value"))
        for name, value in values.items():
            table.add_row(name, escape(value))
        console.print()
        console.print(table)


def _parts(row: RecipePublic) -> Iterator[tuple[str, dict[str, str]]]:
    sizes = row.sizes
    parameters, tokens = f"{sizes.parameters:,}", f"{sizes.tokens_per_step:,}"
    yield "size", {"layers": layers(row), "parameters": parameters, "tokens a step": tokens}
    yield "gate", {name: show(value) for name, value in row.gates.items()}
    gates = set(row.gates)  # the rows of a step are both
    yield "override", {name: show(value) for name, value in row.overrides.items() if name not in gates}
