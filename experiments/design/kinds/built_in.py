"""The built-in hybrid model as a kind of workload: its arms differ by gates and values. Torch-free."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ablate.experiments.design.gate import Claim, Facts, Gate, GateValue, read_field, replace_fields, show
from ablate.experiments.design.gates import GATES, back_ends_of, with_gates
from ablate.experiments.design.kinds.gate_readings import GateReading, read_gates
from ablate.experiments.design.kinds.kind import ArmConfig, Draft, Drafts, LossRows, StepWork, slice_problems
from ablate.experiments.design.problems import listed, pointer, without_repeats
from ablate.experiments.design.recipes import OF_AN_ARM, OF_TRAINING, OF_VALIDATION, OVERRIDES, RECIPES, Recipe
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.design.workload import VariantSpec, Workload
from ablate.experiments.errors import SpecProblem
from ablate.experiments.node_classes import NODE_CLASSES
from ablate.experiments.outcomes import BASELINE
from ablate.kernels.backends import Lane, NodeClass
from ablate.kernels.scan_switches import CHUNK_SIZES
from ablate.model.back_end_limits import check_back_ends
from ablate.model.blocks import BLOCKS
from ablate.model.config import (
    BLOCK_KINDS,
    DIVISIBLE_ATTENTION,
    StepsConfig,
    TrainConfig,
    check_mesh,
    generates_code,
    layer_runs,
)
from ablate.model.counts import num_parameters, step_flops
from ablate.model.data.corpus import BUILT_IN
from ablate.model.errors import ConfigError

_ALSO_SHAPE = {"micro_batch"}
"""Gates whose value is a size. It is part of the shape, because the noise of a step depends on its duration."""
PROFILED_DEVICES = ("cpu", "cuda")
"""Torch's names of devices whose kernels, or operators, its profiler reports."""
_GATE_PATHS = frozenset(gate.path for gate in GATES.values()) - _ALSO_SHAPE


@dataclass(frozen=True, kw_only=True)
class BuiltInArm(TrainConfig, ArmConfig):
    """A recipe of the built-in hybrid model with gates and values."""

    marked_by = "model"
    own_process = False
    attested = True

    @classmethod
    def takes(cls, workload: Workload) -> bool:
        """Return whether the spec names a built-in recipe."""
        return workload.built_in

    @classmethod
    def drafts(cls, spec: AblationSpec) -> Drafts:
        """Resolve the arms of a spec with a built-in recipe."""
        return _drafts(spec)

    @cached_property
    def gates(self) -> dict[str, GateValue]:
        """All gates with their values."""
        return {gate.name: gate.read(self) for gate in GATES.values()}

    def lane(self) -> str:
        """Return the lane of the scan."""
        return str(self.model.scan.lane)

    def back_ends(self) -> frozenset[str]:
        """Return the back ends that a worker on a GPU tries, of those that the gates ask for."""
        return back_ends_of(self.gates, self.model.pattern)

    def readings(self, gates: Mapping[str, Any], facts: Facts) -> dict[str, GateReading]:
        """Compare the requested gates with the recorded facts of the model and its kernels."""
        return read_gates(gates, facts, pattern=self.model.pattern, devices=self.devices)

    def shape(self) -> dict[str, Any]:
        """Return the configuration without its gates, seed and steps."""
        return _without_gates({name: value for name, value in self.values_without_seed.items() if name != "steps"})

    def content(self) -> dict[str, Any]:
        """Return the fields that have an effect and differ from the defaults, so that a later field changes nothing."""
        unused = {"seed", "steps"}
        unused |= {path for letter, kind in BLOCKS.items() if letter not in self.model.pattern for path in kind.fields}
        unused |= {gate.path for gate in GATES.values() if gate.unused_because(self.gates, devices=self.devices)}
        unused |= set() if self.loss == "chunked" else {"loss_chunk_tokens"}
        return _differing(self.values_with_seed, asdict(TrainConfig()), unused)

    def asked_content(self) -> dict[str, Any]:
        """Return the content without micro-batch and threads, and with row lengths to the nearest power of two."""
        free = {"micro_batch", "threads", "data.seq_len"}
        content = {name: value for name, value in self.content().items() if name not in free}
        return {**content, "log2 of data.seq_len": round(math.log2(self.data.seq_len))}

    def claim_of(self, name: str) -> Claim:
        """Return the claim of a gate."""
        return GATES[name].claim

    def describe(self) -> str:
        """Return rows and tokens: an answer holds only for rows of the same length."""
        return f"{self.micro_batch:,} row{'' if self.micro_batch == 1 else 's'} of {self.data.seq_len:,} tokens"

    @property
    def values(self) -> Mapping[str, Any]:
        """Values of the model and the optimiser."""
        values = {name: self._override(name) for name in OF_AN_ARM}
        return {name: value for name, value in values.items() if value is not None}

    def _override(self, name: str) -> Any:
        return read_field(self, OVERRIDES[name].path)

    @property
    def rows(self) -> LossRows:
        """Values of data, vocabulary and batch."""
        training, validation = ({name: self._override(name) for name in own} for own in (OF_TRAINING, OF_VALIDATION))
        return LossRows(training=training, validation={**validation, "val_seq_len": self.data.val_row})

    @property
    def work(self) -> StepWork:
        """Work of a step by the sizes of the model."""
        return StepWork(tokens=self.tokens_per_step, flops=step_flops(self))

    @property
    def parameters(self) -> int:
        """Trainable parameters by the sizes of the model."""
        return num_parameters(self.model)

    @property
    def untrained_loss(self) -> float:
        """The logarithm of the vocabulary."""
        return math.log(self.model.vocab_size)

    @property
    def compiles(self) -> bool:
        """Whether a pass before step 0 compiles something."""
        return generates_code(self)

    @property
    def devices(self) -> int:
        """Devices that share a step."""
        return self.mesh.devices

    @property
    def corpus(self) -> str:
        """Corpus of the training data."""
        return self.data.corpus

    @property
    def prepared(self) -> str:
        """Text of everything that decides the prepared dataset."""
        data = replace(self.data, second_share=0.0, documents="separate", val_seq_len=self.data.val_row)
        return f"{data!r} {self.model.vocab_size}"

    @property
    def dataset(self) -> str:
        """As `prepared`."""
        return self.prepared

    @property
    def sources(self) -> tuple[Path, ...]:
        """The folders of the corpora."""
        return tuple(Path(name) for name in self.data.corpora if name not in BUILT_IN)

    @property
    def preparation(self) -> str:
        """Words for a preparation that failed."""
        return "the data could not be prepared"

    @property
    def advice(self) -> str:
        """Advice to the user when a preparation takes too long."""
        return "; use a smaller corpus or max_corpus_mib"

    def topology(self, node_class: NodeClass) -> str | None:
        """Return the topology with as many chips as the step uses."""
        return node_class.topologies.get(self.devices)

    def peak_flops(self, node_class: NodeClass) -> float | None:
        """Return the peak of all devices of the step for its dtype."""
        return node_class.peak(self.dtype, self.devices)


def _drafts(spec: AblationSpec) -> Drafts:
    recipe, node_class = RECIPES[spec.workload.name], NODE_CLASSES[spec.placement.node_class]
    step_problems = [*slice_problems(spec), *_schedule_problems(spec, node_class)]
    problems = [*_node_problems(spec), *recipe_problems(spec), *_recipe_problems(recipe, node_class), *step_problems]
    if step_problems:  # illegal steps make no configuration
        return Drafts(arms=(), problems=tuple(problems))
    base, override_problems = _workload(spec, recipe)
    problems += override_problems
    bases: dict[str, TrainConfig | None] = {}
    for name, own in spec.variants.items():
        bases[name], own_problems = (
            (base, list(_not_its_own(spec, name, own))) if base is None else _of_variant(spec, name, base)
        )
        problems += own_problems
    if problems or base is None:
        return Drafts(arms=(), problems=tuple(problems))
    parts = [
        _arm(bases.get(name) or base, _Where(spec=spec, arm=name), node_class) for name in (BASELINE, *spec.variants)
    ]
    legal = tuple(arm for part in parts for arm in part.arms)
    problems = without_repeats([*(part.problems for part in parts), list(_device_problems(spec, legal))])
    return Drafts(arms=legal, problems=tuple(problems))


def recipe_problems(spec: AblationSpec) -> Iterator[SpecProblem]:
    """Find parts of a spec with a recipe that only fit a command."""
    hint = "use gates; or workload.command"
    node_class, devices = NODE_CLASSES[spec.placement.node_class], spec.placement.devices
    if devices not in node_class.devices:
        allowed = listed(node_class.devices)
        detail = f"the devices of a recipe share each of its steps evenly; given: {devices}"
        detail += f"; allowed with a recipe on node class '{node_class}': {allowed}"
        yield SpecProblem(pointer=pointer("placement", "devices"), detail=detail, hint="workload.command can use more")
    if spec.workload.profile and (node_class.compiles_only or node_class.device_type not in PROFILED_DEVICES):
        why = (
            "executes nothing" if node_class.compiles_only else "runs on XLA, whose steps torch's profiler does not see"
        )
        detail = f"no step is profiled on node class '{node_class}', which {why}"
        yield SpecProblem(pointer=pointer("workload", "profile"), detail=detail, hint="leave profile out")
    for key in ("args", "env"):
        if getattr(spec.baseline, key):
            detail = f"'{key}' belongs to a command; this workload is recipe '{spec.workload.recipe}'"
            yield SpecProblem(pointer=pointer("baseline", key), detail=detail, hint=hint)
    for name, own in spec.variants.items():
        if own.gates is None and not own.overrides:
            detail = f"the variant changes a command; this workload is recipe '{spec.workload.recipe}'"
            yield SpecProblem(pointer=pointer("variants", name), detail=detail, hint=hint)


def _node_problems(spec: AblationSpec) -> Iterator[SpecProblem]:
    if spec.placement.nodes > 1:
        detail = f"the built-in model runs on the devices of one node; given: {spec.placement.nodes} nodes"
        hint = "workload.command, and recipes of packages, run on several"
        yield SpecProblem(pointer=pointer("placement", "nodes"), detail=detail, hint=hint)


def _schedule_problems(spec: AblationSpec, node_class: NodeClass) -> Iterator[SpecProblem]:
    """Find reasons why the trials of `spec` cannot validate by the schedule that it requests."""
    steps, where = spec.workload.steps, pointer("workload", "steps", "val_every")
    if not steps.val_every:
        return
    if node_class.compiles_only:
        detail = f"node class '{node_class}' executes nothing, so val_every has no effect"
        yield SpecProblem(pointer=where, detail=detail, hint="leave val_every out")
    if steps.slice:
        detail = "between slices the other trials of the block run, so val_every cannot be combined with slice"
        yield SpecProblem(pointer=where, detail=detail, hint="leave slice or val_every out")
    if not steps.val_rows:
        detail = "val_every evaluates validation rows, but val_rows is 0"
        yield SpecProblem(pointer=where, detail=detail, hint="set workload.steps.val_rows")
    if steps.val_every > steps.timed:
        detail = f"val_every is {steps.val_every}; allowed: 0 to {steps.timed}, the timed steps"
        yield SpecProblem(pointer=where, detail=detail)


def _device_problems(spec: AblationSpec, arms: Sequence[Draft]) -> Iterator[SpecProblem]:
    """Find arms that need other devices than the placement gives to a block."""
    placement = spec.placement
    for arm in arms:
        where = _Where(spec=spec, arm=arm.name).pointer("devices")
        wanted = arm.gates["devices"]
        if wanted > placement.devices:
            detail = f"gate 'devices' = {wanted}, and placement.devices gives a block {placement.devices}"
            yield SpecProblem(pointer=where, detail=detail, hint=f"set placement.devices: {wanted}")
        elif wanted < placement.devices and arm.gates["lane"] == Lane.XLA:
            detail = f"gate 'devices' = {wanted}; a step of lane xla uses all {placement.devices} devices of its block"
            yield SpecProblem(pointer=where, detail=detail, hint="remove devices")
    most = max((arm.gates["devices"] for arm in arms), default=placement.devices)
    if most < placement.devices:
        detail = f"a block gets {placement.devices} devices, and no arm uses more than {most}"
        yield SpecProblem(pointer=pointer("placement", "devices"), detail=detail, hint="give a block fewer devices")


def _recipe_problems(recipe: Recipe, node_class: NodeClass) -> Iterator[SpecProblem]:
    if recipe.node_classes and node_class.name not in recipe.node_classes:
        detail = f"recipe '{recipe.name}' is not meant for node class '{node_class}'; allowed: "
        yield SpecProblem(pointer="#/placement/node_class", detail=detail + listed(recipe.node_classes))
    elif not node_class.lanes:
        detail = f"node class '{node_class}' has no implemented lane yet; node classes with a lane: "
        ready = [entry.name for entry in NODE_CLASSES.values() if entry.lanes]
        yield SpecProblem(pointer="#/placement/node_class", detail=detail + listed(ready))


def _workload(spec: AblationSpec, recipe: Recipe) -> tuple[TrainConfig | None, list[SpecProblem]]:
    """Apply steps and overrides; report and leave out each illegal override, to find all of them."""
    fixed = {"steps": StepsConfig(**spec.workload.steps.model_dump(exclude={"equal"}))}
    left = dict(sorted(spec.workload.overrides.items()))
    problems: list[SpecProblem] = []
    while True:
        changes = {OVERRIDES[key].path: value for key, value in left.items()}
        try:
            config = replace_fields(recipe.config, {**changes, **fixed})
        except ConfigError as error:
            guilty = next((key for key in left if OVERRIDES[key].path == error.field), None)
            problems.append(_override_problem(guilty, error))
            if guilty is None:
                return None, problems
            del left[guilty]
        else:
            return (None if problems else config), problems


def _devices(spec: AblationSpec) -> int:
    """Return the devices of a block; 1 for a number that `recipe_problems` refuses."""
    able = spec.placement.devices in NODE_CLASSES[spec.placement.node_class].devices
    return spec.placement.devices if able else 1


def _not_its_own(spec: AblationSpec, name: str, own: VariantSpec) -> Iterator[SpecProblem]:
    """Find values of a variant that all arms share, and those that a gate sets."""
    for key in own.overrides:
        where = pointer("variants", name, "overrides", key)
        if key not in OF_AN_ARM:
            detail = f"'{key}' is one value for all arms, or no two could be compared; allowed: {listed(OF_AN_ARM)}"
            yield SpecProblem(pointer=where, detail=detail, hint="set it under workload.overrides")
        elif key in {**spec.baseline.gates, **(own.gates or {})}:
            whose = "this variant" if key in (own.gates or {}) else "the baseline"
            detail = f"'{key}' is set as a gate of {whose}, which would win"
            yield SpecProblem(pointer=where, detail=detail, hint=f"set '{key}' in one place: under gates")


def _of_variant(spec: AblationSpec, name: str, base: TrainConfig) -> tuple[TrainConfig | None, list[SpecProblem]]:
    """Apply a variant's values to the configuration of the workload."""
    own = spec.variants[name]
    problems = list(_not_its_own(spec, name, own))
    if problems or not own.overrides:
        return base, problems
    changes = {OVERRIDES[key].path: value for key, value in own.overrides.items()}
    if own.overrides.get("seq_len", base.data.seq_len) != base.data.seq_len:
        changes |= {"data.val_seq_len": base.data.val_row}  # a loss is compared over equal rows
    try:
        return replace_fields(base, changes), []
    except ConfigError as error:
        guilty = next((key for key in own.overrides if OVERRIDES[key].path == error.field), None)
        named = guilty or next(
            (key for key, override in OVERRIDES.items() if override.path == error.field), error.field
        )
        where = pointer("variants", name, "overrides", *([guilty] if guilty else []))
        return None, [SpecProblem(pointer=where, detail=f"override '{named}' {error.message}")]


def _override_problem(key: str | None, error: ConfigError) -> SpecProblem:
    if key is not None:
        return SpecProblem(pointer=pointer("workload", "overrides", key), detail=f"override '{key}' {error.message}")
    detail = f"the overrides do not fit together: {error.field} {error.message}"
    named = next((name for name, override in OVERRIDES.items() if override.path == error.field), None)
    hint = f"override '{named}' as well" if named else None
    return SpecProblem(pointer="#/workload/overrides", detail=detail, hint=hint)


_RECIPE = "#/workload/recipe"


@dataclass(frozen=True, kw_only=True)
class _Where:
    """Lines of the spec that set the values of an arm."""

    spec: AblationSpec
    arm: str

    @property
    def own(self) -> Mapping[str, GateValue]:
        """Gates that the spec sets for this arm itself."""
        return self.spec.baseline.gates if self.arm == BASELINE else self.spec.variants[self.arm].gates or {}

    @property
    def gates(self) -> Mapping[str, GateValue]:
        """Gates that the spec sets for this arm, those of the baseline included."""
        return {**self.spec.baseline.gates, **self.own}

    def pointer(self, gate: str) -> str:
        """Return the line that sets a gate's value: as a gate, as an override, or by the recipe."""
        line = ("baseline",) if self.arm == BASELINE else ("variants", self.arm)
        if gate in self.own:
            return pointer(*line, "gates", gate)
        if gate in self.gates:
            return pointer("baseline", "gates", gate)
        if self.arm != BASELINE and gate in self.spec.variants[self.arm].overrides:
            return pointer(*line, "overrides", gate)
        return pointer("workload", "overrides", gate) if gate in self.spec.workload.overrides else _RECIPE

    def problem(self, error: ConfigError, base: TrainConfig) -> SpecProblem:
        """Return the problem of an illegal value at its line; `base` has the values that no gate sets."""
        gate = next(gate for gate in GATES.values() if gate.path == error.field)
        where, message = self.pointer(gate.name), _in_names_of_specs(error.message)
        by_recipe = where == _RECIPE
        if gate.name not in self.gates and not by_recipe:
            return SpecProblem(pointer=where, detail=f"override '{gate.name}' {message}")
        values = {**{name: other.read(base) for name, other in GATES.items()}, **self.gates}
        needs = gate.needs(values[gate.name]).items()
        hint = next((f"add {other}: {show(value)}" for other, value in needs if values[other] != value), None)
        if hint is None and gate.name in OVERRIDES and by_recipe:
            hint = f"set workload.overrides.{gate.name}"
        return SpecProblem(pointer=where, detail=f"the gates do not fit together: {gate.name} {message}", hint=hint)


def _in_names_of_specs(text: str) -> str:
    """Replace paths of TrainConfig in `text` by the gates and overrides that set them."""
    names = {gate.path: gate.name for gate in GATES.values()} | {one.path: key for key, one in OVERRIDES.items()}
    return _PATH.sub(lambda path: names.get(path[0], path[0]), text)


_PATH = re.compile(r"\b(?:model|optim|mesh|data|steps)(?:\.[a-z_0-9]+)+")


def _arm(base: TrainConfig, where: _Where, node_class: NodeClass) -> Drafts:
    """Return the arm if it has no problems, and its problems."""
    try:
        config = with_gates(base, {"devices": _devices(where.spec), **where.gates})
        check_mesh(config)
        _check_loss_chunks(config)
        _check_scan_chunks(config)
        _check_layer_loops(config)
    except ConfigError as error:
        return Drafts(arms=(), problems=(where.problem(error, base),))
    arm = BuiltInArm(**{field.name: getattr(config, field.name) for field in fields(config)})
    problems = without_repeats(_gate_problems(gate, arm.gates, where, arm, node_class) for gate in GATES.values())
    if not problems:
        try:
            check_back_ends(arm)
        except ConfigError as error:
            problems = [where.problem(error, base)]
    return Drafts(arms=() if problems else (Draft(where.arm, arm.gates, arm),), problems=tuple(problems))


def _check_loss_chunks(config: TrainConfig) -> None:
    """Raise ConfigError for a chunked loss whose one chunk holds all tokens of a device's step."""
    tokens = config.micro_batch // config.mesh.data * (config.data.seq_len // config.mesh.context)
    chunk = config.loss_chunk_tokens
    if config.loss == "chunked" and chunk >= tokens:
        detail = (
            f"'chunked' with loss_chunk_tokens {chunk:,} is the dense loss: a step has {tokens:,} tokens, one chunk"
        )
        raise ConfigError("loss", f"{detail}; allowed: workload/overrides/loss_chunk_tokens below {tokens:,}")


def _check_scan_chunks(config: TrainConfig) -> None:
    """Raise ConfigError for chunks longer than a row: most of their memory and time would go to padding."""
    scan, tokens = config.model.scan, config.data.seq_len
    by_steps = scan.schedule == "sequential" and scan.lane is Lane.REFERENCE
    if "M" not in config.model.pattern or by_steps or scan.chunk_size <= tokens:
        return
    fitting = [size for size in CHUNK_SIZES if size <= tokens]
    detail = f"{scan.chunk_size} is longer than a row of {tokens:,} tokens, so the row would be padded"
    raise ConfigError("model.scan.chunk_size", f"{detail}; allowed: {listed(fitting)}")


def _check_layer_loops(config: TrainConfig) -> None:
    """Raise ConfigError for loops over layers of a pattern in which no group of blocks repeats."""
    model = config.model
    if not model.scan_layers or any(run.trips > 1 for run in layer_runs(model)):
        return
    backend = model.attention.backend
    without = "" if backend in DIVISIBLE_ATTENTION else f" without attention by kernel '{backend}'"
    detail = f"is true; no group of adjacent blocks{without} repeats in pattern {model.pattern}, so there is no loop"
    raise ConfigError("model.scan_layers", f"{detail}; allowed: false, or a pattern such as MFMF")


def _gate_problems(
    gate: Gate, gates: Mapping[str, Any], where: _Where, config: TrainConfig, node_class: NodeClass
) -> list[SpecProblem]:
    pattern, devices = config.model.pattern, config.mesh.devices
    value, named = gates[gate.name], gate.name in where.own
    problems = []
    setting = gate.unused_because(gates, devices=devices)
    used = setting is None
    needless = gate.supports(node_class, Lane(gates["lane"]), gate.default) is None
    reason = gate.supports(node_class, Lane(gates["lane"]), value) if used or named else None
    if reason is not None:
        hint = _support_hint(gate, node_class)
        problems.append(SpecProblem(pointer=where.pointer(gate.name), detail=reason, hint=hint))
    for other, needed in gate.needs(value).items():
        if used and gates[other] != needed:
            detail = f"gate '{gate.name}' = {show(value)} requires {other} = {show(needed)}; it is {show(gates[other])}"
            hint = f"add {other}: {show(needed)}"
            problems.append(SpecProblem(pointer=where.pointer(gate.name), detail=detail, hint=hint))
    if named and not used and reason is None:
        detail = f"gate '{gate.name}' has no effect with {'one device' if gate.of_devices else setting}"
        problems.append(SpecProblem(pointer=where.pointer(gate.name), detail=detail, hint=f"remove {gate.name}"))
    if named and needless and gate.block and gate.block not in pattern:
        kind = BLOCK_KINDS[gate.block]
        detail = f"gate '{gate.name}' needs a block of kind {gate.block} ({kind}); pattern '{pattern}' has none"
        problems.append(SpecProblem(pointer=where.pointer(gate.name), detail=detail))
    return problems


def _support_hint(gate: Gate, node_class: NodeClass) -> str | None:
    able = [show(value) for value in gate.values if gate.runs_on(node_class, value)]
    if not able:
        return None
    return f"values of '{gate.name}' that run on {node_class}: {listed(able)}"


def _differing(
    config: Mapping[str, Any], defaults: Mapping[str, Any], unused: Set[str], where: str = ""
) -> dict[str, Any]:
    """Return the fields of `config` that differ from `defaults`, except at the dotted paths `unused`."""
    kept: dict[str, Any] = {}
    for name, value in config.items():
        default = defaults.get(name)
        if f"{where}{name}" in unused or value == default:
            continue
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            kept |= _differing(value, default, unused, f"{where}{name}.")
        else:
            kept[f"{where}{name}"] = value
    return kept


def _without_gates(config: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    return {
        name: _without_gates(value, f"{where}{name}.") if isinstance(value, dict) else value  # plain JSON
        for name, value in config.items()
        if f"{where}{name}" not in _GATE_PATHS
    }
