"""Arms: the baseline and the variants of a spec, resolved into complete configurations, or problems with pointers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from experiments.design.config_fields import config_to_json, replace_fields
from experiments.design.gate import Gate, GateValue, show
from experiments.design.gates import GATES
from experiments.design.problems import listed, pointer, without_repeats
from experiments.design.recipes import OVERRIDES, RECIPES, Recipe
from experiments.design.spec import AblationSpec
from experiments.digest import digest
from experiments.documents import Frozen
from experiments.errors import SpecProblem
from experiments.outcomes import BASELINE, VARIANT, ArmRole
from kernels.backends import NODE_CLASSES, Lane, NodeClass
from kernels.scan_switches import CHUNK_SIZES
from model.config import BLOCK_KINDS, StepsConfig, TrainConfig, check_mesh
from model.errors import ConfigError

MAX_TRIALS = 8
"""Arms of an ablation with slices: all trials of a block are in the machine's memory at the same time."""

def slice_problems(spec: AblationSpec, node_class: NodeClass) -> Iterator[SpecProblem]:
    """Find why the trials of `spec` cannot run in slices, if that is asked for."""
    steps, arms = spec.workload.steps, 1 + len(spec.variants)
    if not steps.slice:
        return
    where = pointer("workload", "steps", "slice")
    if not node_class.slices:
        able = listed(name for name, entry in NODE_CLASSES.items() if entry.slices)
        detail = f"the trials of a block cannot run in slices on node class '{node_class}': {_why_not(node_class)}"
        yield SpecProblem(pointer=where, detail=detail, hint=f"node classes that can: {able}; or leave slice out")
    if spec.placement.devices > 1:
        detail = f"slices are for trials on one device; {spec.placement.devices} were asked for"
        yield SpecProblem(pointer=where, detail=detail, hint="leave slice out, or use one device")
    if arms > MAX_TRIALS:
        detail = f"{arms} arms would be in memory together; with slices allowed: {MAX_TRIALS}, the baseline among them"
        yield SpecProblem(pointer=where, detail=detail, hint="leave slice out, or ask about fewer variants")
    if steps.timed % (2 * steps.slice):
        detail = f"{steps.timed} timed steps are no even number of slices of {steps.slice}"
        fitting = [size for size in range(1, steps.timed // 2 + 1) if steps.timed % (2 * size) == 0]
        hint = f"slices that fit: {listed(map(str, fitting))}" if fitting else "use an even number of timed steps"
        yield SpecProblem(pointer=where, detail=detail, hint=hint)


def _why_not(node_class: NodeClass) -> str:
    if node_class.compiles_only:
        return "nothing is executed there"
    return "a trial has the device to itself there, and any other process on it makes the trial invalid"


class Arm(Frozen):
    """The baseline or one variant, fully resolved."""

    name: str
    role: ArmRole
    gates: Mapping[str, Any]
    """Every gate with its resolved value, defaults included."""
    config: Mapping[str, Any]
    """TrainConfig as plain JSON, without the seed (the block sets it)."""
    digest: str
    """See `arm_digest`."""


def arm_digest(gates: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the digest of what an arm is, whatever its name and role."""
    return digest({"gates": gates, "config": config})


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """The arms of a spec, baseline first, and everything that is wrong with them."""

    arms: tuple[Arm, ...]
    problems: tuple[SpecProblem, ...]


def resolve(spec: AblationSpec) -> Resolution:
    """Resolve every arm of `spec`; arms are empty when there are problems."""
    recipe = RECIPES[spec.workload.recipe]
    node_class = NODE_CLASSES[spec.placement.node_class]
    overrides = tuple(sorted(spec.workload.overrides.items()))
    unsliced = list(slice_problems(spec, node_class))
    if unsliced:  # no configuration of steps can be made of them
        return Resolution(arms=(), problems=(*_recipe_problems(recipe, node_class), *unsliced))
    base, found = _workload(recipe.name, overrides, _steps(spec), spec.placement.devices)
    problems = [*_recipe_problems(recipe, node_class), *found]
    if problems or base is None:
        return Resolution(arms=(), problems=tuple(problems))
    inherited = _items(spec.baseline.gates)
    arms = [_arm(base, BASELINE, inherited, (), node_class)]
    arms += [_arm(base, name, _items(own.gates), inherited, node_class) for name, own in spec.variants.items()]
    resolved = tuple(arm for part in arms for arm in part.arms)
    equality = _unequal_arms(resolved) if spec.purpose == "calibration" else _equal_arms(resolved)
    problems = without_repeats([*(part.problems for part in arms), equality])
    return Resolution(arms=() if problems else resolved, problems=tuple(problems))


def _items(gates: Mapping[str, GateValue]) -> tuple[tuple[str, GateValue], ...]:
    return tuple(gates.items())


def _steps(spec: AblationSpec) -> StepsConfig:
    steps = spec.workload.steps
    return StepsConfig(
        warmup=steps.warmup, warmup_s=steps.warmup_s, timed=steps.timed, slice=steps.slice, val_rows=steps.val_rows
    )


def _recipe_problems(recipe: Recipe, node_class: NodeClass) -> Iterator[SpecProblem]:
    if recipe.node_classes and node_class.name not in recipe.node_classes:
        detail = f"recipe '{recipe.name}' is not meant for node class '{node_class}'; it runs on: "
        yield SpecProblem(pointer="#/placement/node_class", detail=detail + listed(recipe.node_classes))
    elif not node_class.lanes:
        detail = f"node class '{node_class}' has no implemented lane yet; node classes with one: "
        ready = [entry.name for entry in NODE_CLASSES.values() if entry.lanes]
        yield SpecProblem(pointer="#/placement/node_class", detail=detail + listed(ready))


@lru_cache(maxsize=256)
def _workload(
    recipe: str, overrides: tuple[tuple[str, Any], ...], steps: StepsConfig, devices: int
) -> tuple[TrainConfig | None, tuple[SpecProblem, ...]]:
    """Apply overrides; each illegal one is reported and left out, so that all of them are found."""
    left = dict(overrides)
    problems: list[SpecProblem] = []
    while True:
        changes = {OVERRIDES[key].path: value for key, value in left.items()}
        try:
            config = replace_fields(RECIPES[recipe].config, {**changes, "steps": steps, "mesh.devices": devices})
        except ConfigError as error:
            guilty = next((key for key in left if OVERRIDES[key].path == error.field), None)
            problems.append(_override_problem(guilty, error))
            if guilty is None:
                return None, tuple(problems)
            del left[guilty]
        else:
            return (None if problems else config), tuple(problems)


def _override_problem(key: str | None, error: ConfigError) -> SpecProblem:
    if key is not None:
        return SpecProblem(pointer=pointer("workload", "overrides", key), detail=f"override '{key}' {error.message}")
    detail = f"the overrides do not fit together: {error.field} {error.message}"
    named = next((name for name, override in OVERRIDES.items() if override.path == error.field), None)
    hint = f"override '{named}' as well" if named else None
    return SpecProblem(pointer="#/workload/overrides", detail=detail, hint=hint)


@lru_cache(maxsize=4096)
def _arm(
    base: TrainConfig,
    name: str,
    own: tuple[tuple[str, GateValue], ...],
    inherited: tuple[tuple[str, GateValue], ...],
    node_class: NodeClass,
) -> Resolution:
    asked = {**dict(inherited), **dict(own)}
    where = _Where(arm=name, own=frozenset(dict(own)), inherited=frozenset(dict(inherited)))
    try:
        config = replace_fields(base, {GATES[gate].path: _typed(gate, value) for gate, value in asked.items()})
        check_mesh(config)
        _check_loss_chunks(config)
        _check_scan_chunks(config)
    except ConfigError as error:
        guilty = next(gate.name for gate in GATES.values() if gate.path == error.field)
        detail = f"the gates do not fit together: {guilty} {error.message}"
        return Resolution(arms=(), problems=(SpecProblem(pointer=where.pointer(guilty), detail=detail),))
    gates = {gate.name: gate.read(config) for gate in GATES.values()}
    problems = without_repeats(
        _gate_problems(gate, gates, where, config.model.pattern, node_class) for gate in GATES.values()
    )
    values = config_to_json(config)
    del values["seed"]
    role: ArmRole = BASELINE if name == BASELINE else VARIANT
    arm = Arm(name=name, role=role, gates=gates, config=values, digest=arm_digest(gates, values))
    return Resolution(arms=(arm,), problems=tuple(problems))


def _check_loss_chunks(config: TrainConfig) -> None:
    """Raise ConfigError for a chunked loss that would be dense: all tokens of a device's step in one chunk."""
    tokens = config.micro_batch // config.mesh.devices * config.data.seq_len
    chunk = config.loss_chunk_tokens
    if config.loss == "chunked" and chunk >= tokens:
        detail = (
            f"'chunked' with loss_chunk_tokens {chunk:,} is the dense loss: a step has {tokens:,} tokens, one chunk"
        )
        raise ConfigError("loss", f"{detail}; allowed: workload/overrides/loss_chunk_tokens below {tokens:,}")


def _check_scan_chunks(config: TrainConfig) -> None:
    """Raise ConfigError for chunks longer than a row, which would be mostly padding, in memory and in time."""
    scan, tokens = config.model.scan, config.data.seq_len
    by_steps = scan.schedule == "sequential" and scan.lane is Lane.REFERENCE
    if "M" not in config.model.pattern or by_steps or scan.chunk_size <= tokens:
        return
    fitting = [size for size in CHUNK_SIZES if size <= tokens]
    detail = f"{scan.chunk_size} is longer than a row of {tokens:,} tokens, which would be padded to it"
    raise ConfigError("model.scan.chunk_size", f"{detail}; allowed: {listed(fitting)}")


def _typed(gate: str, value: GateValue) -> GateValue:
    return Lane(str(value)) if gate == "lane" else value


@dataclass(frozen=True, kw_only=True)
class _Where:
    """Which lines of the spec speak about an arm's gates."""

    arm: str
    own: frozenset[str]
    inherited: frozenset[str]

    def pointer(self, gate: str) -> str:
        if gate in self.own:
            return pointer(*(("baseline",) if self.arm == BASELINE else ("variants", self.arm)), "gates", gate)
        return pointer("baseline", "gates", gate) if gate in self.inherited else "#/workload/recipe"


def _gate_problems(
    gate: Gate, gates: Mapping[str, Any], where: _Where, pattern: str, node_class: NodeClass
) -> list[SpecProblem]:
    value, asked = gates[gate.name], gate.name in where.own
    found = []
    setting = gate.unused_because(gates)
    used = setting is None
    needless = gate.supports(node_class, Lane(gates["lane"]), gate.default) is None
    reason = gate.supports(node_class, Lane(gates["lane"]), value) if used or asked else None
    if reason is not None:
        found.append(SpecProblem(pointer=where.pointer(gate.name), detail=reason, hint=_support_hint(gate, node_class)))
    for other, needed in gate.needs(value).items():
        if used and gates[other] != needed:
            detail = f"gate '{gate.name}' = {show(value)} requires {other} = {show(needed)}; it is {show(gates[other])}"
            hint = f"add {other}: {show(needed)}"
            found.append(SpecProblem(pointer=where.pointer(gate.name), detail=detail, hint=hint))
    if asked and not used and reason is None:
        detail = f"gate '{gate.name}' has no effect with {setting}"
        found.append(SpecProblem(pointer=where.pointer(gate.name), detail=detail, hint=f"remove {gate.name}"))
    if asked and needless and gate.block and gate.block not in pattern:
        kind = BLOCK_KINDS[gate.block]
        detail = f"gate '{gate.name}' needs a block of kind {gate.block} ({kind}); pattern '{pattern}' has none"
        found.append(SpecProblem(pointer=where.pointer(gate.name), detail=detail))
    return found


def _support_hint(gate: Gate, node_class: NodeClass) -> str | None:
    able = [show(value) for value in gate.values if node_class.name in gate.node_classes(value)]
    if not able:
        return None
    return f"values of '{gate.name}' that run on {node_class}: {listed(able)}"


def _equal_arms(arms: Sequence[Arm]) -> list[SpecProblem]:
    seen: dict[str, str] = {}
    found = []
    for arm in arms:
        first = seen.setdefault(arm.digest, arm.name)
        if first != arm.name:
            other = "the baseline" if first == BASELINE else f"variant '{first}'"
            detail = f"variant '{arm.name}' resolves to the same configuration as {other}"
            hint = "change at least one gate, or remove the variant"
            found.append(SpecProblem(pointer=pointer("variants", arm.name), detail=detail, hint=hint))
    return found


def _unequal_arms(arms: Sequence[Arm]) -> list[SpecProblem]:
    """Find variants that are no repeat of the baseline: the noise of a node is measured with equal arms."""
    hint = "give it the baseline's gates, or leave out purpose: calibration"
    return [
        SpecProblem(
            pointer=pointer("variants", arm.name),
            detail=f"variant '{arm.name}' resolves to another configuration than the baseline, which it should repeat",
            hint=hint,
        )
        for arm in arms[1:]
        if arm.digest != arms[0].digest
    ]
