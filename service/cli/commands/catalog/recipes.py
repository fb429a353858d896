"""`ablate catalog recipes`: the configurations that a spec can start from."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.markup import escape

from ablate.experiments.design.gate import show
from ablate.experiments.design.listings import RecipePublic, public_recipes
from ablate.experiments.node_classes import NODE_CLASSES
from ablate.experiments.reporting.terminal.terminal_table import TerminalTable, numbers, texts
from ablate.experiments.reporting.terminal.terminal_table import names as named
from ablate.kernels.backends import Lane
from ablate.service.cli import completion
from ablate.service.cli.arguments import rows_named
from ablate.service.cli.output import JsonOption, guarded, out, print_json

app = typer.Typer()


@app.command()
@guarded
def recipes(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE]...", help="Show all values of these recipes.", autocompletion=completion.recipes
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the recipes of this program, one per line, or show sizes, gates and overrides of the named ones."""
    rows = recipes_named(names or (), public_recipes())
    if as_json:
        print_json(rows)
    elif not names:
        out().print(_table(rows))
    else:
        for row in rows:
            _print(row)


def recipes_named(names: Sequence[str], rows: Sequence[RecipePublic]) -> list[RecipePublic]:
    """Return the recipes with these names, all of them without names. Raises SpecError for unknown names."""
    every = ", ".join(row.name for row in rows)
    return rows_named(names, rows, unknown=f"unknown recipe {{!r}}; known: {every}")


def layers(row: RecipePublic) -> str:
    """Return the blocks of a built-in model, for example "2 x Mamba-3 MIMO mixer, 1 x gated MLP"."""
    return (
        "" if row.sizes is None else ", ".join(f"{count} x {kind}" for kind, count in row.sizes.layers.items() if count)
    )


def meant_for(row: RecipePublic) -> str:
    """Return the node classes of a recipe, and those on which an arm must name the lane."""
    if row.sizes is None:  # the recipe of a package has no lane
        return ", ".join(row.node_classes)
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
        sizes = ("", "") if row.sizes is None else (f"{row.sizes.parameters:,}", f"{row.sizes.tokens_per_step:,}")
        table.add_row(row.name, meant_for(row), *sizes, row.summary)
    return table


def _print(row: RecipePublic) -> None:
    """Print a recipe's values, one per line, with numbers in the notation of specs."""
    console = out()
    console.print(f"[bold]{row.name}[/] version {row.version}, runs on {meant_for(row)}\n{escape(row.summary)}")
    for title, values in _sections(row):
        table = TerminalTable(*named(title), *texts("value"))
        for name, value in values.items():
            table.add_row(name, escape(value))
        console.print()
        console.print(table)


def _sections(row: RecipePublic) -> Iterator[tuple[str, dict[str, str]]]:
    if row.sizes is not None:
        parameters, tokens = f"{row.sizes.parameters:,}", f"{row.sizes.tokens_per_step:,}"
        yield "size", {"layers": layers(row), "parameters": parameters, "tokens a step": tokens}
    yield "gate", {name: show(value) for name, value in row.gates.items()}
    # micro_batch is a gate and an override
    yield "override", {name: show(value) for name, value in row.overrides.items() if name not in row.gates}
