"""Recipes of other packages: a declaration without torch, which an entry point of the group `ablate.recipes` names.

    [project.entry-points."ablate.recipes"]
    my-model = "my_package.declaration:RECIPE"

The declaration is a mapping with the fields of `PackageRecipe`; its function `train` is imported only in a trial.
"""

import re
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from ablate.experiments.design.gate import Claim, GateValue
from ablate.experiments.design.problems import listed, shown
from ablate.experiments.design.recipes import RECIPES
from ablate.experiments.design.spec_values import MOST_LETTERS
from ablate.experiments.documents import Frozen, first_problem
from ablate.experiments.in_trial.ablate_imports import package_digest
from ablate.experiments.node_classes import NODE_CLASSES

GROUP = "ablate.recipes"
LANE = "recipe"
"""Lane of a node that has a package's recipe: `recipe:NAME@DIGEST`."""
_DIGEST_LETTERS = 12
_NAME = re.compile(f"[a-z0-9][a-z0-9-]{{0,{MOST_LETTERS - 1}}}")
_FIELD = "^[a-z][a-z0-9_]{0,62}$"
_FUNCTION = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
_LIBRARIES = ("torch", "jax", "tensorflow")

Value: TypeAlias = bool | int | float | str
_FieldName: TypeAlias = Annotated[str, Field(pattern=_FIELD)]
_Text: TypeAlias = Annotated[str, Field(min_length=1, max_length=400)]


class _Strict(Frozen):
    model_config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)


class PackageGate(_Strict):
    """A switchable feature of a package's recipe."""

    question: _Text
    """Question of an ablation of this gate, in one sentence."""
    values: Annotated[tuple[GateValue, ...], Field(min_length=2, strict=False)]
    claim: Annotated[Claim, Field(strict=False)]
    """Its promise about the numbers: schedule-only, re-associates or changes-model."""
    proof: _Text
    """Why the attested value is the live one and not the requested one."""
    blind_to: _Text
    """Limits of the proof."""

    def allows(self, value: object) -> bool:
        """Say whether `value` is one of the gate's values, with the same type (true is not 1)."""
        return any(type(value) is type(allowed) and value == allowed for allowed in self.values)


class PackageOverride(_Strict):
    """A value of the configuration that a spec may change."""

    description: _Text
    minimum: int | float | None = None
    maximum: int | float | None = None
    values: Annotated[tuple[Value, ...], Field(strict=False)] = ()
    """Allowed values; empty for numbers within the limits."""

    def problem(self, value: Value, default: Value) -> str | None:
        """Return what is allowed instead of `value`; None if it is."""
        if self.values:
            allowed = any(type(value) is type(one) and value == one for one in self.values)
            return None if allowed else f"one of {listed(map(str, self.values))}"
        if isinstance(default, bool):
            return None if isinstance(value, bool) else "true or false"
        if isinstance(default, str):
            return None if isinstance(value, str) else "text"
        number = type(value) is int or (isinstance(default, float) and type(value) is float)
        low, high = self.minimum, self.maximum
        if number and (low is None or value >= low) and (high is None or value <= high):  # type: ignore[operator]
            return None
        kind = "a number" if isinstance(default, float) else "an integer"
        limits = [f"from {low:g}" if low is not None else "", f"to {high:g}" if high is not None else ""]
        return " ".join([kind, *filter(None, limits)])


class PackageRecipe(_Strict):
    """The declaration of a recipe."""

    name: str
    """Name of the entry point."""
    distribution: str
    """Name and version of the installed distribution."""
    version: Annotated[int, Field(ge=1)]
    """A change of the model under the same values raises it."""
    summary: _Text
    config: Annotated[dict[_FieldName, Value], Field(min_length=1, max_length=200)]
    """Every value of the workload, with its default."""
    gates: Annotated[dict[_FieldName, PackageGate], Field(min_length=1, max_length=100)]
    """Fields of `config` that a variant may switch and that the program attests."""
    overrides: dict[_FieldName, PackageOverride] = Field(default_factory=dict)
    """Fields of `config` that a spec may change, for all arms or for one."""
    node_classes: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Node classes that it runs on; empty means every one that executes programs."""
    train: Annotated[str, Field(pattern=_FUNCTION)]
    """`module:function` of the training program, called as function(trial, config) in the trial's process."""
    tokens_per_step: Callable[[Mapping[str, Value]], int] | None = None
    """Tokens of one step for a configuration."""
    flops_per_step: Callable[[Mapping[str, Value]], int] | None = None
    """Model FLOPs of one step for a configuration, forward and backward."""
    check: Callable[[Mapping[str, Value]], None] | None = None
    """Raises ValueError for values that do not fit together."""
    digest: str
    """Digest of the Python files of the package that `train` is in."""

    @field_validator("node_classes")
    @classmethod
    def _able(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        able = [name for name in NODE_CLASSES if runs_programs(name)]
        wrong = [name for name in value if not runs_programs(name)]
        if wrong:
            raise ValueError(f"node class {shown(wrong[0])} runs no recipes of packages; allowed: {listed(able)}")
        return value

    @model_validator(mode="after")
    def _of_the_configuration(self) -> "PackageRecipe":
        for kind, names in (("gate", self.gates), ("override", self.overrides)):
            missing = [name for name in names if name not in self.config]
            if missing:
                raise ValueError(f"{kind} '{missing[0]}' is no field of config; fields: {listed(self.config)}")
        for name, gate in self.gates.items():
            if not gate.allows(self.config[name]):
                raise ValueError(f"gate '{name}' is {self.config[name]!r} in config, which is none of its values")
        for name, override in self.overrides.items():
            allowed = override.problem(self.config[name], self.config[name])
            if allowed is not None:
                raise ValueError(f"override '{name}' is {self.config[name]!r} in config; allowed: {allowed}")
        both = sorted(set(self.gates) & set(self.overrides))
        if both:
            raise ValueError(f"'{both[0]}' is a gate and an override; declare it once")
        return self

    @property
    def lane(self) -> str:
        """Lane of the nodes that have this recipe with this code."""
        return lane_of_package(self.name, self.digest)

    def runs_on(self, node_class: str) -> bool:
        """Say whether trials on a node class, of the table or of any GPU, can run it."""
        return node_class in self.node_classes if self.node_classes else runs_programs(node_class)

    @property
    def places(self) -> tuple[str, ...]:
        """Node classes of the table that can run it."""
        return tuple(name for name in self.node_classes or NODE_CLASSES if self.runs_on(name))


def runs_programs(node_class: str) -> bool:
    """Say whether trials on a node class may start programs of their own."""
    entry = NODE_CLASSES.get(node_class)
    return entry is not None and not entry.compiles_only and entry.device_type != "xla"


def lane_over(lane: str, nodes: int) -> str:
    """Return the lane of workers with an allocation of so many nodes, who offer no other ones."""
    return lane if nodes == 1 else f"{lane}*{nodes}"


def nodes_of_lane(lane: str) -> int:
    """Return the nodes over which a trial of this lane runs."""
    number = lane.rpartition("*")[2]
    return int(number) if "*" in lane and number.isdecimal() else 1


def lane_of_package(recipe: str, digest: str) -> str:
    """Return the lane of the nodes with this recipe and code."""
    return f"{LANE}:{recipe}@{digest.removeprefix('sha256:')[:_DIGEST_LETTERS]}"


class Installed(NamedTuple):
    """The recipes of the packages that this interpreter can import."""

    recipes: Mapping[str, PackageRecipe]
    problems: Mapping[str, str]
    """Why a declared recipe cannot be used, by its name."""


@lru_cache(maxsize=1)
def installed() -> Installed:
    """Load all declarations once in this process."""
    return load(sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)))


def code_folders(train: str) -> tuple[Path, ...]:
    """Return the folders from which this interpreter imports the package of `train`, also an editable one.

    Those that others add to its search path are included, because the package may depend on them.
    """
    spec = find_spec(train.partition(":")[0].partition(".")[0])
    own = [] if spec is None else [*(spec.submodule_search_locations or []), *([spec.origin] if spec.origin else [])]
    return tuple(Path(place) for place in [*own, *sys.path] if place.startswith("/"))


def recipe_names() -> list[str]:
    """Return the names of all recipes: the built-in ones, then those of packages."""
    return [*RECIPES, *installed().recipes]


def load(points: list[EntryPoint]) -> Installed:
    """Load the declarations of some entry points."""
    recipes: dict[str, PackageRecipe] = {}
    problems: dict[str, str] = {}
    for point in points:
        try:
            if point.name in recipes or point.name in problems:
                raise ValueError("two packages declare a recipe of this name")
            recipes[point.name] = _load(point)
        except Exception as error:  # code of others: a broken package must not stop the service or a node
            reason = first_problem(error) if isinstance(error, ValidationError) else f"{type(error).__name__}: {error}"
            problems[point.name] = f"recipe '{point.name}' ({point.value}) cannot be used: {reason}"[:500]
            recipes.pop(point.name, None)
    return Installed(recipes=recipes, problems=problems)


def _load(point: EntryPoint) -> PackageRecipe:
    if not _NAME.fullmatch(point.name):
        raise ValueError(f"name {shown(point.name)} is not allowed; allowed: 1 to {MOST_LETTERS} of a-z, 0-9, '-'")
    if point.name in RECIPES:
        raise ValueError("a built-in recipe has this name")
    before = {name for name in _LIBRARIES if name in sys.modules}
    declared = point.load()
    heavy = [name for name in _LIBRARIES if name in sys.modules and name not in before]
    if heavy:
        raise ValueError(f"its declaration imports {heavy[0]}; import it in the module of `train` only")
    if not isinstance(declared, Mapping):
        raise TypeError(f"{point.value} is a {type(declared).__name__}; allowed: a mapping")
    train = str(declared.get("train", ""))
    package = point.dist
    return PackageRecipe(
        **declared,
        name=point.name,
        distribution="" if package is None else f"{package.name} {package.version}",
        digest=package_digest(train.partition(":")[0].partition(".")[0]) if train else "",
    )
