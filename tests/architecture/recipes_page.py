"""docs/recipes.md, generated from the recipes: what each is, how large, and what an arm has that names no gate."""

from collections.abc import Iterable, Iterator

from experiments.design.gate import show
from experiments.design.listings import RecipePublic, public_recipes
from service.cli.commands.recipes import layers, meant_for

_HEAD = """\
# Recipes

Generated from `experiments/design/recipes.py` by `make docs`. `ablate recipes` prints a line for each, `ablate recipes
NAME` all values of one. A recipe is model, data and optimiser under a name and a version. A spec names one under
`workload.recipe`, changes its numbers for every arm under `workload.overrides` ([which there are](spec.md#overrides),
and what a recipe has without), and switches gates arm by arm.
"""
_GATES = """
## Gates

What an arm has that does not name the gate. Gates of the baseline hold for every variant that does not name the gate
itself; an override of `micro_batch` counts where no arm names that gate. What each does, and where its values run:
[gates.md](gates.md), or `ablate gates --recipe NAME`.
"""


def recipes_page() -> str:
    """Return the page."""
    rows = public_recipes()
    names = [f"`{row.name}`" for row in rows]
    what = ((f"`{row.name}`", str(row.version), meant_for(row), row.summary) for row in rows)
    return "".join(
        [
            f"{_HEAD}\n{_table(('recipe', 'version', 'runs on', 'what it is'), what)}",
            f"\n## Sizes\n\n{_table(('', *names), _sizes(rows))}",
            f"{_GATES}\n{_table(('gate', *names), _gates(rows))}",
        ]
    )


def _sizes(rows: list[RecipePublic]) -> Iterator[tuple[str, ...]]:
    sizes = [row.sizes for row in rows]
    yield "layers", *map(layers, rows)
    yield "`d_model`", *(f"{one.d_model:,}" for one in sizes)
    yield "parameters", *(f"{one.parameters:,}" for one in sizes)
    yield "tokens a step", *(f"{one.tokens_per_step:,}" for one in sizes)


def _gates(rows: list[RecipePublic]) -> Iterator[tuple[str, ...]]:
    for name in rows[0].gates:
        yield f"[`{name}`](gates.md#{name})", *(f"`{show(row.gates[name])}`" for row in rows)


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    head, *lines = (f"| {' | '.join(line)} |\n" for line in (columns, *rows))
    return "".join((head, "|---" * len(columns), "|\n", *lines))
