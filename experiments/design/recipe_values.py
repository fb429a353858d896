"""What a recipe is made of: sizes, the gates of an arm that names none, and what a spec may override."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from experiments.design.fields import read_field
from experiments.design.gate import GateValue
from experiments.design.gates import GATES
from experiments.design.recipes import OVERRIDES, RECIPES, Recipe
from model.config import BLOCK_KINDS
from model.parameters import num_parameters


class RecipeSizes(BaseModel):
    """How large a model and its step are."""

    model_config = ConfigDict(frozen=True)

    layers: dict[str, int]
    """Blocks of each kind, in the order of `BLOCK_KINDS`."""
    d_model: int
    parameters: int
    """Trainable ones."""
    tokens_per_step: int
    """Rows of a step times the tokens of a row."""


class RecipePublic(BaseModel):
    """One recipe."""

    model_config = ConfigDict(frozen=True)

    name: str
    version: int
    summary: str
    node_classes: tuple[str, ...]
    """Those that it is meant for; empty means any."""
    sizes: RecipeSizes
    gates: dict[str, GateValue]
    """What an arm has that does not name the gate."""
    overrides: dict[str, Any]
    """What a spec may change, as it is without that."""


def recipe_values() -> list[RecipePublic]:
    """Return every recipe with its values."""
    return [_public(recipe) for recipe in RECIPES.values()]


def _public(recipe: Recipe) -> RecipePublic:
    config = recipe.config
    return RecipePublic(
        name=recipe.name,
        version=recipe.version,
        summary=recipe.summary,
        node_classes=recipe.node_classes,
        sizes=RecipeSizes(
            layers={kind: config.model.pattern.count(letter) for letter, kind in BLOCK_KINDS.items()},
            d_model=config.model.d_model,
            parameters=num_parameters(config.model),
            tokens_per_step=config.tokens_per_step,
        ),
        gates={gate.name: gate.read(config) for gate in GATES.values()},
        overrides={name: read_field(config, key.path) for name, key in OVERRIDES.items()},
    )
