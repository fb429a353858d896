"""Generate docs/recipes.md from the recipes: summaries, sizes and default gates."""

from collections.abc import Iterable, Iterator

from ablate.experiments.design.gate import show
from ablate.experiments.design.listings import RecipePublic, public_recipes
from ablate.service.cli.commands.catalog.recipes import layers, meant_for

_HEAD = """\
# Recipes

This page lists the recipes. `make docs` generates it from `experiments/design/recipes.py`.
`ablate catalog recipes` prints the list, `ablate catalog recipes NAME` all values of one recipe.

A recipe is a model, its data and its optimiser under a name and a version. A spec names a recipe under
`workload.recipe`, changes its values for all arms under `workload.overrides` or for one variant under
`variants.NAME.overrides` ([list](spec.md#overrides)), and switches gates per arm. A metric compares only arms of equal
work ([quality.md](quality.md#what-must-be-equal)).
"""
_GATES = """
## Gates

The table shows a gate's value in arms that do not name it. Variants inherit the gates of the baseline. An override of
`micro_batch` applies where no arm names that gate. [gates.md](gates.md) and `ablate catalog gates --recipe NAME`
describe the gates and the node classes that run their values.
"""


def recipes_page() -> str:
    """Return the page."""
    rows = [row for row in public_recipes() if row.sizes is not None]  # without those of installed packages
    names = [f"`{row.name}`" for row in rows]
    summaries = ((f"`{row.name}`", str(row.version), meant_for(row), row.summary) for row in rows)
    return "".join(
        [
            f"{_HEAD}\n{_table(('recipe', 'version', 'runs on', 'summary'), summaries)}",
            f"\n## Sizes\n\n{_table(('', *names), _sizes(rows))}",
            f"{_GATES}\n{_table(('gate', *names), _gates(rows))}",
        ]
    )


def _sizes(rows: list[RecipePublic]) -> Iterator[tuple[str, ...]]:
    sizes = [row.sizes for row in rows if row.sizes is not None]
    yield "layers", *map(layers, rows)
    yield "`d_model`", *(f"{one.d_model:,}" for one in sizes)
    yield "parameters", *(f"{one.parameters:,}" for one in sizes)
    yield "tokens per step", *(f"{one.tokens_per_step:,}" for one in sizes)


def _gates(rows: list[RecipePublic]) -> Iterator[tuple[str, ...]]:
    for name in rows[0].gates:
        yield f"[`{name}`](gates.md#{name})", *(f"`{show(row.gates[name])}`" for row in rows)


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    head, *lines = (f"| {' | '.join(line)} |\n" for line in (columns, *rows))
    return "".join((head, "|---" * len(columns), "|\n", *lines))
