"""Gates and recipes as the command line and the documentation list them."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from ablate.experiments.design.gate import Claim, GateValue, read_field, show
from ablate.experiments.design.gates import GATES
from ablate.experiments.design.packages import PackageRecipe, installed
from ablate.experiments.design.recipes import OVERRIDES, RECIPES, Recipe
from ablate.model.config import BLOCK_KINDS
from ablate.model.counts import active_parameters, num_parameters


class GatePublic(BaseModel):
    """One gate."""

    model_config = ConfigDict(frozen=True)

    name: str
    question: str
    values: tuple[GateValue, ...]
    recipes: dict[str, GateValue]
    """Value in an arm that does not name the gate, by recipe."""
    claim: Claim
    field: str
    requires: dict[str, GateValue]
    """Values of other gates that a value requires unless it is the default or `free`."""
    free: tuple[GateValue, ...]
    unused_with: tuple[dict[str, GateValue], ...]
    of_devices: bool
    """Whether `unused_with` holds for one device only."""
    node_classes: dict[str, tuple[str, ...]]
    """Node classes that can run each value today, by the value as written in a spec."""
    attested_by: str
    proof: str
    blind_to: str


class RecipeSizes(BaseModel):
    """Sizes of a model and its step."""

    model_config = ConfigDict(frozen=True)

    layers: dict[str, int]
    """Blocks of each kind, in the order of `BLOCK_KINDS`."""
    d_model: int
    parameters: int
    """Trainable parameters."""
    active_parameters: int
    """Those that one token uses: all but the experts that it does not go to."""
    tokens_per_step: int
    """Rows of a step times tokens of a row."""


class RecipePublic(BaseModel):
    """One recipe."""

    model_config = ConfigDict(frozen=True)

    name: str
    version: int
    summary: str
    node_classes: tuple[str, ...]
    """Node classes that it is meant for; empty means any."""
    sizes: RecipeSizes | None
    """None for the recipe of a package."""
    gates: dict[str, GateValue]
    """Values in an arm that names no gate."""
    overrides: dict[str, Any]
    """Values that a spec may override."""


def public_gates() -> list[GatePublic]:
    """Return all gates with their values in recipes and the node classes that can run them, packages' last."""
    own = [_of_package(recipe, name) for recipe in installed().recipes.values() for name in recipe.gates]
    return [*_built_in_gates(), *own]


def _built_in_gates() -> list[GatePublic]:
    return [
        GatePublic(
            name=gate.name,
            question=gate.question,
            values=gate.values,
            recipes={recipe.name: gate.read(recipe.config) for recipe in RECIPES.values()},
            claim=gate.claim,
            field=gate.path,
            requires=dict(gate.requires),
            free=gate.free,
            unused_with=tuple(dict(setting) for setting in gate.unused_with),
            of_devices=gate.of_devices,
            node_classes={show(value): gate.node_classes(value) for value in gate.values},
            attested_by=gate.attested_by,
            proof=gate.proof,
            blind_to=gate.blind_to,
        )
        for gate in GATES.values()
    ]


def _of_package(recipe: PackageRecipe, name: str) -> GatePublic:
    gate = recipe.gates[name]
    return GatePublic(
        name=name,
        question=gate.question,
        values=gate.values,
        recipes={recipe.name: recipe.config[name]},
        claim=gate.claim,
        field=f"config.{name}",
        requires={},
        free=(),
        unused_with=(),
        of_devices=False,
        node_classes={show(value): recipe.places for value in gate.values},
        attested_by=f"trial.attest of {recipe.distribution}",
        proof=gate.proof,
        blind_to=gate.blind_to,
    )


def public_recipes() -> list[RecipePublic]:
    """Return all recipes with their values, those of packages last."""
    return [*(_public(recipe) for recipe in RECIPES.values()), *map(_public_package, installed().recipes.values())]


def gates_of(recipe: str) -> Mapping[str, str]:
    """Return the question of each gate of a recipe by its name. Raises KeyError for an unknown recipe."""
    if recipe in RECIPES:
        return {gate.name: gate.question for gate in GATES.values()}
    return {name: gate.question for name, gate in installed().recipes[recipe].gates.items()}


def _public_package(recipe: PackageRecipe) -> RecipePublic:
    return RecipePublic(
        name=recipe.name,
        version=recipe.version,
        summary=recipe.summary,
        node_classes=recipe.places,
        sizes=None,
        gates={name: recipe.config[name] for name in recipe.gates},
        overrides={name: recipe.config[name] for name in recipe.overrides},
    )


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
            active_parameters=active_parameters(config.model),
            tokens_per_step=config.tokens_per_step,
        ),
        gates={gate.name: gate.read(config) for gate in GATES.values()},
        overrides={name: read_field(config, key.path) for name, key in OVERRIDES.items()},
    )
