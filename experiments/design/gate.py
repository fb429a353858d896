"""A gate: its question, its values, the field of TrainConfig that it sets, and how a receipt proves it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

from ablate.experiments.node_classes import HOPPER_ALONE, NODE_CLASSES, is_gpu
from ablate.kernels.backends import GENERATED_LANES, Lane, NodeClass
from ablate.model.config import TrainConfig

GateValue: TypeAlias = bool | int | str
Facts: TypeAlias = Mapping[str, Any]
Config = TypeVar("Config")

ANY_LANE = tuple(Lane)
_DEFAULTS = TrainConfig()


class Claim(StrEnum):
    """Promise of a gate about the numbers."""

    SCHEDULE_ONLY = "schedule-only"
    """Step-1 loss is bit-identical."""
    RE_ASSOCIATES = "re-associates"
    """Sums are grouped differently: equal but for rounding."""
    CHANGES_MODEL = "changes-model"
    """Another numerical model: losses are not expected to agree."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """One switchable feature."""

    name: str
    question: str
    """Question of an ablation of this gate, in one sentence."""
    values: tuple[GateValue, ...]
    path: str
    """Dotted TrainConfig field of the value; the gate changes no other field."""
    claim: Claim
    lanes: Mapping[GateValue, tuple[Lane, ...]] = field(default_factory=dict)
    """Lanes that implement a value; unlisted values need no particular lane."""
    device_types: Mapping[GateValue, tuple[str, ...]] = field(default_factory=dict)
    """Torch device types that can run a value; unlisted values run on any."""
    tried_on_gpus: tuple[GateValue, ...] = ()
    """Values that need packages or a kind of GPU which not every node of a class has: a worker on a GPU tries each with
    a small problem (model/back_ends.py)."""
    not_deterministic: tuple[GateValue, ...] = ()
    """Values whose kernels torch refuses in a trial, because all its algorithms have to be deterministic."""
    tpu_kernels: tuple[GateValue, ...] = ()
    """Values that need TPU kernels on an XLA device, which XLA on other processors cannot run."""
    requires: Mapping[str, GateValue] = field(default_factory=dict)
    """Values that other gates must have unless this one is at its default or `free`."""
    free: tuple[GateValue, ...] = ()
    """Values besides the default that require nothing of other gates."""
    unused_with: tuple[Mapping[str, GateValue], ...] = ()
    """Settings of other gates, each as a whole, under which this one has no effect. Naming it there is an error."""
    of_devices: bool = False
    """Whether `unused_with` holds for one device only."""
    in_kernels: bool = False
    """Whether it changes generated kernels; then equal kernels in two arms prove that it had no effect."""
    block: str | None = None
    """Letter of the block kind without which this gate has no effect."""
    attest: Callable[[Facts], Any]
    """Read the live value from the recorded facts; None when no fact records it."""
    shown_as: Callable[[Mapping[str, Any], Facts], Any] | None = None
    """Return the value that `attest` must read when the requested gates are live. None: the requested value itself. For
    gates with a value that leaves the choice to the code."""
    attested_by: str
    """Facts that `attest` reads, in words."""
    proof: str
    """Source of the facts: why they show the live value and not the requested one."""
    blind_to: str
    """Limits of the proof."""

    @cached_property
    def default(self) -> GateValue:
        """The gate's value in the default configuration."""
        return self.read(_DEFAULTS)

    def typed(self, value: GateValue) -> GateValue:
        """Return `value` with the type of the gate's field."""
        return Lane(str(value)) if self.name == "lane" else value

    def read(self, config: TrainConfig) -> GateValue:
        """Return this gate's value in `config`."""
        value = read_field(config, self.path)
        return str(value) if isinstance(value, StrEnum) else value

    def needs(self, value: GateValue) -> Mapping[str, GateValue]:
        """Return the values that `value` requires of other gates."""
        return {} if value in (self.default, *self.free) else self.requires

    def allows(self, value: object) -> bool:
        """Say whether `value` is one of the gate's values, with the same type (true is not 1)."""
        return any(type(value) is type(allowed) and value == allowed for allowed in self.values)

    def supports(self, node_class: NodeClass, lane: Lane, value: GateValue) -> str | None:
        """Return why `value` cannot run with `lane` on `node_class`; None when it can."""
        if self.name == "lane":
            reason = node_class.lane_refusal(Lane(str(value)))
            needs = is_gpu(node_class.name) and value in GENERATED_LANES
            return f"{reason}. {HOPPER_ALONE}" if needs else reason
        setting = f"gate '{self.name}'" if value is True else f"gate '{self.name}' = {show(value)}"
        if value in self.not_deterministic:
            return f"{setting} runs in no trial: its kernels are not deterministic, and torch refuses them"
        if not self._has_device_for(node_class, value):
            return f"{setting} needs node class {' or '.join(self._with_device_for(value))}; this is '{node_class}'"
        needed = self.lanes.get(value, ANY_LANE)
        if lane in needed:
            return None
        names = " or ".join(needed)
        if not set(needed) & set(node_class.lanes):
            hopper = f". {HOPPER_ALONE}" if is_gpu(node_class.name) and set(needed) <= set(GENERATED_LANES) else ""
            return f"{setting} needs lane {names}, which has no implementation on node class '{node_class}'{hopper}"
        return f"{setting} needs lane {names}; this arm runs lane {lane}"

    def node_classes(self, value: GateValue) -> tuple[str, ...]:
        """Return the node classes of the table that have a lane for `value`."""
        return tuple(name for name, entry in NODE_CLASSES.items() if self.runs_on(entry, value))

    def runs_on(self, node_class: NodeClass, value: GateValue) -> bool:
        """Return whether a node class has a device and a lane for `value`."""
        lanes = set(self.lanes.get(value, ANY_LANE))
        return self._has_device_for(node_class, value) and bool(lanes & set(node_class.lanes))

    def _with_device_for(self, value: GateValue) -> tuple[str, ...]:
        return tuple(name for name, entry in NODE_CLASSES.items() if self._has_device_for(entry, value))

    def _has_device_for(self, node_class: NodeClass, value: GateValue) -> bool:
        types = self.device_types.get(value, (node_class.device_type,))
        if value in self.not_deterministic:
            return False
        if node_class.device_type == "xla" and value in self.tpu_kernels and not node_class.tpu_kernels:
            return False
        return node_class.device_type in types

    def unused_because(self, gates: Mapping[str, Any], *, devices: int = 1) -> str | None:
        """Return the setting in `gates` under which this gate has no effect, such as "schedule = sequential"."""
        if self.of_devices and devices > 1:
            return None
        for setting in self.unused_with:
            if all(gates.get(name) == value for name, value in setting.items()):
                return " and ".join(f"{name} = {show(value)}" for name, value in setting.items())
        return None


def show(value: object) -> str:
    """Write a gate value as in a spec: true, 16, sdpa."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_field(config: Any, path: str) -> Any:
    """Return the value at the dotted `path`, for example "model.scan.chunk_size"."""
    for name in path.split("."):
        config = getattr(config, name)
    return config


def replace_fields(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a copy of the dataclass `config` with new values at dotted paths.

    All values change at once. Raises ConfigError when the result is illegal.
    """
    own = {path: value for path, value in changes.items() if "." not in path}
    nested: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        head, dot, rest = path.partition(".")
        if dot:
            nested.setdefault(head, {})[rest] = value
    for head, part in nested.items():
        own[head] = replace_fields(getattr(config, head), part)
    return replace(config, **own)  # type: ignore[type-var]  # every part of TrainConfig is a dataclass
