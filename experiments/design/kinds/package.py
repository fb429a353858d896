"""The recipe of an installed package as a kind of workload: a program whose arms differ by gates, which it attests."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ablate.experiments.credentials import credential
from ablate.experiments.design.gate import Claim, Facts, show
from ablate.experiments.design.kinds.built_in import recipe_problems
from ablate.experiments.design.kinds.gate_readings import GateReading
from ablate.experiments.design.kinds.kind import Draft, Drafts, StepWork
from ablate.experiments.design.kinds.program import (
    ProgramArm,
    logged_problems,
    requirement_problems,
    requirements,
    shared_fields,
    turn_problems,
)
from ablate.experiments.design.packages import (
    PackageRecipe,
    Value,
    code_folders,
    installed,
    lane_of_package,
    lane_over,
    recipe_names,
)
from ablate.experiments.design.problems import listed, nearest, pointer, shown
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.design.workload import Workload
from ablate.experiments.errors import SpecProblem
from ablate.experiments.outcomes import BASELINE


@dataclass(frozen=True, kw_only=True)
class PackageSettings:
    """The recipe of an installed package that a trial runs, with all that readers of its receipt need."""

    recipe: str
    version: int
    distribution: str
    """Name and version of the installed distribution, such as "own-recipe 0.1.0"."""
    digest: str
    """Digest of the package's Python files."""
    train: str
    """`module:function` of the training program."""
    values: Mapping[str, bool | int | float | str]
    """The recipe's configuration with overrides and gates."""
    claims: Mapping[str, str]
    """Claim of each gate about the numbers."""
    flops_per_step: int | None = None
    """Model FLOPs of a step, forward and backward; None if the recipe does not say."""
    tokens_per_step: int | None = None
    """Tokens of a step over all ranks; None if the recipe does not say."""


@dataclass(frozen=True, kw_only=True)
class PackageArm(ProgramArm):
    """A recipe of a package with gates and values."""

    package: PackageSettings

    marked_by = "package"
    attested = True

    @classmethod
    def takes(cls, workload: Workload) -> bool:
        """Return whether the spec names a recipe that is not built in."""
        return workload.recipe is not None and not workload.built_in

    @classmethod
    def drafts(cls, spec: AblationSpec) -> Drafts:
        """Resolve the arms of a spec with the recipe of a package."""
        recipe = installed().recipes.get(spec.workload.name)
        if recipe is None:
            return Drafts(arms=(), problems=(unknown_recipe(spec.workload.name),))
        problems = (*recipe_problems(spec), *package_problems(spec, recipe))
        parts = () if problems else tuple(_drafts(spec, recipe))
        problems += tuple(part for part in parts if isinstance(part, SpecProblem))
        return Drafts(arms=() if problems else tuple(p for p in parts if isinstance(p, Draft)), problems=problems)

    def code_problem(self, digest: str | None) -> str | None:
        """Return why this is not the digest of the package's Python files; None if it is."""
        if digest == self.package.digest:
            return None
        planned = f"the plan was made with {self.package.digest}"
        return f"the code of recipe '{self.package.recipe}' is {digest} on the node; {planned}"

    @property
    def flops_per_step(self) -> int:
        """Model FLOPs of a step, forward and backward; 0 if the recipe does not say."""
        return self.package.flops_per_step or 0

    @property
    def trial_settings(self) -> Mapping[str, Any]:
        """The values for the function that trains."""
        return {"values": dict(self.package.values)}

    def lane(self) -> str:
        """Return the lane of the nodes with the recipe and its code."""
        return lane_over(lane_of_package(self.package.recipe, self.package.digest), self.nodes)

    @property
    def libraries(self) -> tuple[Path, ...]:
        """The folders of the package and of the search path."""
        return code_folders(self.package.train)

    def readings(self, gates: Mapping[str, Any], facts: Facts) -> dict[str, GateReading]:
        """Compare the requested gates with what the program attested."""
        return {name: _attested(value, facts.get(name)) for name, value in gates.items()}

    def shape(self) -> dict[str, Any]:
        """Return the recipe with its values, gates excepted, and the number of devices."""
        shared = {"recipe": self.package.recipe, "version": self.package.version}
        nodes = {} if self.nodes == 1 else {"nodes": self.nodes}
        return {**shared, "values": dict(self.values), "devices": self.devices, **nodes}

    def content(self) -> dict[str, Any]:
        """Return the program and its values; its recipe may have any name."""
        return {"train": self.package.train, "values": dict(self.package.values)}

    def claim_of(self, name: str) -> Claim:
        """Return the declared claim of a gate."""
        return Claim(self.package.claims[name])

    def describe(self) -> str:
        """Return the recipe and its values."""
        values = ", ".join(f"{name} {show(value)}" for name, value in self.package.values.items())
        return f"{self.package.recipe}: {values}"

    @property
    def values(self) -> Mapping[str, Any]:
        """Values of the recipe that are no gates."""
        return {name: value for name, value in self.package.values.items() if name not in self.package.claims}

    @property
    def work(self) -> StepWork | None:
        """Work of a step where the recipe declares it."""
        tokens, flops = self.package.tokens_per_step, self.package.flops_per_step
        return None if tokens is None or flops is None else StepWork(tokens=tokens, flops=flops)


def _attested(requested: Any, observed: Any) -> GateReading:
    if observed is None:
        return GateReading(requested=requested, observed=None, live=False, how="the program attested nothing")
    live = type(observed) is type(requested) and observed == requested
    return GateReading(requested=requested, observed=observed, live=live, how="attested by the program")


def unknown_recipe(name: str) -> SpecProblem:
    """Return the problem of a recipe that is neither built in nor of a package that works here."""
    own = installed()
    names = recipe_names()
    detail = own.problems.get(name, f"unknown recipe {shown(name)}; known: {listed(names)}")
    return SpecProblem(pointer=pointer("workload", "recipe"), detail=detail, hint=nearest(name, names))


def package_problems(spec: AblationSpec, recipe: PackageRecipe) -> Iterator[SpecProblem]:
    """Find parts of a spec that do not fit the recipe of a package."""
    if not recipe.runs_on(spec.placement.node_class):
        detail = f"recipe '{recipe.name}' is not meant for node class '{spec.placement.node_class}'; allowed: "
        yield SpecProblem(pointer=pointer("placement", "node_class"), detail=detail + listed(recipe.places))
    yield from turn_problems(spec)
    if spec.workload.steps.val_every:
        detail = "a package's recipe validates by itself, so val_every has no effect"
        yield SpecProblem(pointer=pointer("workload", "steps", "val_every"), detail=detail, hint="leave val_every out")
    yield from _override_problems(spec.workload.overrides, recipe, "workload", "overrides")
    yield from logged_problems(spec)
    yield from requirement_problems(spec)
    yield from _gate_problems(spec.baseline.gates, recipe, "baseline", "gates")
    for name, own in spec.variants.items():
        yield from _gate_problems(own.gates or {}, recipe, "variants", name, "gates")
        yield from _override_problems(own.overrides, recipe, "variants", name, "overrides")


def _override_problems(values: Mapping[str, Any], recipe: PackageRecipe, *place: str) -> Iterator[SpecProblem]:
    for name, value in values.items():
        where, override = pointer(*place, name), recipe.overrides.get(name)
        if override is None:
            hint = f"'{name}' is a gate: put it under gates" if name in recipe.gates else None
            detail = f"unknown override {shown(name)} of recipe '{recipe.name}'; known: {_names(recipe.overrides)}"
            yield SpecProblem(pointer=where, detail=detail, hint=hint or nearest(name, recipe.overrides))
        elif allowed := override.problem(value, recipe.config[name]):
            yield SpecProblem(pointer=where, detail=f"override '{name}' is {shown(value)}; allowed: {allowed}")
        elif words := credential(name, value) if isinstance(value, str) else None:
            detail = f"the value of {name} looks like {words}, which everybody who reads the answer would see"
            yield SpecProblem(pointer=where, detail=detail, hint="name a secret of the node: workload.secrets: [NAME]")


def _names(names: Mapping[str, Any]) -> str:
    return listed(names) if names else "none"


def _gate_problems(gates: Mapping[str, Any], recipe: PackageRecipe, *place: str) -> Iterator[SpecProblem]:
    for name, value in gates.items():
        where, gate = pointer(*place, name), recipe.gates.get(name)
        if gate is None:
            detail = f"unknown gate {shown(name)} of recipe '{recipe.name}'; known: {listed(recipe.gates)}"
            yield SpecProblem(pointer=where, detail=detail, hint=nearest(name, recipe.gates))
        elif not gate.allows(value):
            detail = f"gate '{name}' is {shown(value)}; allowed: {listed(map(show, gate.values))}"
            yield SpecProblem(pointer=where, detail=detail, hint=nearest(str(value), map(show, gate.values)))


def _drafts(spec: AblationSpec, recipe: PackageRecipe) -> Iterator[Draft | SpecProblem]:
    """Yield every arm, the baseline first, or a problem of an arm."""
    base = {**recipe.config, **_typed(recipe, spec.workload.overrides), **spec.baseline.gates}
    arms = {BASELINE: base}
    arms |= {
        name: {**base, **_typed(recipe, own.overrides), **(own.gates or {})} for name, own in spec.variants.items()
    }
    for name, values in arms.items():
        try:
            config = _config(spec, recipe, name, values)
        except Exception as error:  # functions of the package
            place = ("baseline",) if name == BASELINE else ("variants", name)
            detail = f"recipe '{recipe.name}' refuses these values: {error}"
            yield SpecProblem(pointer=pointer(*place), detail=detail[:500])
        else:
            yield Draft(name, {gate: values[gate] for gate in recipe.gates}, config)


def _typed(recipe: PackageRecipe, values: Mapping[str, Value]) -> dict[str, Value]:
    """Return the values, whole ones of a number as 1.0, because 1 and 1.0 are one value."""
    numbers = {
        name for name, one in recipe.overrides.items() if isinstance(recipe.config[name], float) and not one.values
    }
    return {name: float(value) if name in numbers else value for name, value in values.items()}


def _config(spec: AblationSpec, recipe: PackageRecipe, arm: str, values: Mapping[str, Value]) -> PackageArm:
    if recipe.check is not None:
        recipe.check(dict(values))
    package = PackageSettings(
        recipe=recipe.name,
        version=recipe.version,
        distribution=recipe.distribution,
        digest=recipe.digest,
        train=recipe.train,
        values=dict(values),
        claims={name: str(gate.claim) for name, gate in recipe.gates.items()},
        flops_per_step=_count("flops_per_step", recipe.flops_per_step and recipe.flops_per_step(dict(values))),
        tokens_per_step=_count("tokens_per_step", recipe.tokens_per_step and recipe.tokens_per_step(dict(values))),
    )
    return PackageArm(
        command=("python", "-m", "ablate", recipe.train),
        **requirements(spec.workload, arm),
        package=package,
        **shared_fields(spec),
    )


def _count(name: str, value: object) -> int | None:
    if value is None or (type(value) is int and 0 < value < 2**62):
        return value
    raise ValueError(f"its {name} is {shown(value)}; allowed: a whole number above 0")
