"""Resolve the arms of a spec whose recipe comes from a package, or find the problems with them."""

from collections.abc import Iterator, Mapping
from typing import Any

from experiments.credentials import credential
from experiments.design.gate import show
from experiments.design.packages import PackageRecipe, Value, installed, recipe_names
from experiments.design.problems import listed, nearest, pointer, shown
from experiments.design.program import PackageSettings, ProgramConfig, kernel_problems, program_json, shared_fields
from experiments.design.spec import AblationSpec
from experiments.errors import SpecProblem
from experiments.outcomes import BASELINE


def unknown_recipe(name: str) -> SpecProblem:
    """Return the problem of a recipe that is neither built in nor of a package that works here."""
    own = installed()
    names = recipe_names()
    detail = own.problems.get(name, f"unknown recipe {shown(name)}; known: {listed(names)}")
    return SpecProblem(pointer=pointer("workload", "recipe"), detail=detail, hint=nearest(name, names))


def package_problems(spec: AblationSpec, recipe: PackageRecipe) -> Iterator[SpecProblem]:
    """Find parts of a spec that do not fit the recipe of a package."""
    if spec.placement.node_class not in recipe.places:
        detail = f"recipe '{recipe.name}' is not meant for node class '{spec.placement.node_class}'; allowed: "
        yield SpecProblem(pointer=pointer("placement", "node_class"), detail=detail + listed(recipe.places))
    if spec.workload.steps.slice:
        detail = "the trials of a package's recipe cannot run in slices"
        yield SpecProblem(pointer=pointer("workload", "steps", "slice"), detail=detail, hint="leave slice out")
    if spec.workload.steps.val_every:
        detail = "a package's recipe validates by itself, so val_every has no effect"
        yield SpecProblem(pointer=pointer("workload", "steps", "val_every"), detail=detail, hint="leave val_every out")
    yield from _override_problems(spec.workload.overrides, recipe, "workload", "overrides")
    yield from kernel_problems(spec)
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


def package_arms(
    spec: AblationSpec, recipe: PackageRecipe
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]] | SpecProblem]:
    """Yield name, gates and configuration without the seed of every arm, the baseline first, or a problem of an arm."""
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
            continue
        plain = program_json(config)
        del plain["seed"]
        yield name, {gate: values[gate] for gate in recipe.gates}, plain


def _typed(recipe: PackageRecipe, values: Mapping[str, Value]) -> dict[str, Value]:
    """Return the values, whole ones of a number as 1.0, because 1 and 1.0 are one value."""
    numbers = {
        name for name, one in recipe.overrides.items() if isinstance(recipe.config[name], float) and not one.values
    }
    return {name: float(value) if name in numbers else value for name, value in values.items()}


def _config(spec: AblationSpec, recipe: PackageRecipe, arm: str, values: Mapping[str, Value]) -> ProgramConfig:
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
    return ProgramConfig(
        command=("python", "-m", "ablate", recipe.train),
        requires_kernel=spec.workload.require_kernels.get(arm),
        package=package,
        **shared_fields(spec),
    )


def _count(name: str, value: object) -> int | None:
    if value is None or (type(value) is int and 0 < value < 2**62):
        return value
    raise ValueError(f"its {name} is {shown(value)}; allowed: a whole number above 0")
