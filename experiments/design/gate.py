"""What a gate is: its question, its values, the field of TrainConfig that it sets, and how a receipt proves it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, TypeAlias

from experiments.design.config_fields import read_field, replace_fields
from kernels.backends import NODE_CLASSES, Lane, NodeClass
from model.config import TrainConfig

GateValue: TypeAlias = bool | int | str
Facts: TypeAlias = Mapping[str, Any]

ANY_LANE = tuple(Lane)
_DEFAULTS = TrainConfig()


class Claim(StrEnum):
    """What a gate promises about the numbers."""

    SCHEDULE_ONLY = "schedule-only"
    """Step-1 loss is bit-identical."""
    RE_ASSOCIATES = "re-associates"
    """Sums are grouped differently: equal within an envelope."""
    CHANGES_MODEL = "changes-model"
    """Another numerical model: losses are not expected to agree."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """One switchable feature."""

    name: str
    question: str
    """What an ablation of this gate asks, in one sentence."""
    values: tuple[GateValue, ...]
    path: str
    """Dotted TrainConfig field that holds the value; the only field that the gate touches."""
    claim: Claim
    lanes: Mapping[GateValue, tuple[Lane, ...]] = field(default_factory=dict)
    """Lanes that implement a value; a value that is not listed needs no particular lane."""
    device_types: Mapping[GateValue, tuple[str, ...]] = field(default_factory=dict)
    """Torch's device types that can run a value; a value that is not listed runs on any."""
    tpu_kernels: tuple[GateValue, ...] = ()
    """Values that on an XLA device are kernels for TPUs, which XLA on other processors cannot run."""
    requires: Mapping[str, GateValue] = field(default_factory=dict)
    """Values that other gates must have when this one is neither at its default nor `free`."""
    free: tuple[GateValue, ...] = ()
    """Values besides the default that need nothing of other gates."""
    unused_with: tuple[Mapping[str, GateValue], ...] = ()
    """Settings of other gates, each as a whole, under which this one has no effect: naming it is a contradiction."""
    in_kernels: bool = False
    """Whether it changes generated kernels, so that equal kernels in two arms prove that it changed nothing."""
    block: str | None = None
    """Letter of the block kind that the pattern must contain for this gate to do anything."""
    attest: Callable[[Facts], Any]
    """Read from the recorded facts what was live; None when nothing about it was recorded."""
    shown_as: Callable[[Mapping[str, Any], Facts], Any] | None = None
    """Return what `attest` reads where the values asked for are live, if they can leave this one to the code; without
    it that is the gate's own value."""
    attested_by: str
    """What `attest` looks at, in words."""
    proof: str
    """Where that comes from: why it tells what was live, not what was asked for."""
    blind_to: str
    """What the proof cannot see."""

    @cached_property
    def default(self) -> GateValue:
        """The gate's value in the default configuration."""
        return self.read(_DEFAULTS)

    def apply(self, config: TrainConfig, value: GateValue) -> TrainConfig:
        """Return `config` with this gate at `value`."""
        return replace_fields(config, {self.path: value})

    def read(self, config: TrainConfig) -> GateValue:
        """Return this gate's value in `config`."""
        value = read_field(config, self.path)
        return str(value) if isinstance(value, StrEnum) else value

    def needs(self, value: GateValue) -> Mapping[str, GateValue]:
        """Return the values that other gates must have with this one at `value`."""
        return {} if value in (self.default, *self.free) else self.requires

    def allows(self, value: object) -> bool:
        """Tell whether `value` is one of the gate's values, of exactly the same type (true is not 1)."""
        return any(type(value) is type(known) and value == known for known in self.values)

    def supports(self, node_class: NodeClass, lane: Lane, value: GateValue) -> str | None:
        """Return why `value` cannot run with `lane` on `node_class`, or None when it can."""
        if self.name == "lane":
            return node_class.lane_refusal(Lane(str(value)))
        setting = f"gate '{self.name}'" if value is True else f"gate '{self.name}' = {show(value)}"
        able = self._with_device_for(value)
        if node_class.name not in able:
            return f"{setting} needs node class {' or '.join(able)}; this is '{node_class}'"
        needed = self.lanes.get(value, ANY_LANE)
        if lane in needed:
            return None
        names = " or ".join(needed)
        if not set(needed) & set(node_class.lanes):
            return f"{setting} needs lane {names}, which has no implementation on node class '{node_class}'"
        return f"{setting} needs lane {names}; this arm runs lane {lane}"

    def node_classes(self, value: GateValue) -> tuple[str, ...]:
        """Return the names of the node classes on which some implemented lane can run `value`."""
        lanes, able = set(self.lanes.get(value, ANY_LANE)), self._with_device_for(value)
        return tuple(name for name in able if lanes & set(NODE_CLASSES[name].lanes))

    def _with_device_for(self, value: GateValue) -> tuple[str, ...]:
        return tuple(name for name, entry in NODE_CLASSES.items() if self._has_device_for(entry, value))

    def _has_device_for(self, node_class: NodeClass, value: GateValue) -> bool:
        types = self.device_types.get(value, (node_class.device_type,))
        if node_class.device_type == "xla" and value in self.tpu_kernels and not node_class.tpu_kernels:
            return False
        return node_class.device_type in types

    def unused_because(self, gates: Mapping[str, Any]) -> str | None:
        """Return the setting among `gates` under which this gate has no effect, for example "schedule = sequential"."""
        for setting in self.unused_with:
            if all(gates.get(name) == value for name, value in setting.items()):
                return " and ".join(f"{name} = {show(value)}" for name, value in setting.items())
        return None


def show(value: object) -> str:
    """Write a gate value the way a spec does: true, 16, sdpa."""
    return str(value).lower() if isinstance(value, bool) else str(value)
