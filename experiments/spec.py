"""AblationSpec: what a user submits. One pydantic model that YAML, JSON and TOML load into; unknown keys are errors.

Everything that one value can violate by itself is checked here. What needs several values together (a gate that a
node class lacks, a variant equal to the baseline) is checked when the spec is planned.
"""

import math
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from experiments.digest import digest
from experiments.gates import GATES, GateValue, runs_on, show
from experiments.metrics import METRICS, PRIMARY_METRICS
from experiments.problems import listed, nearest, shown
from experiments.recipes import OVERRIDES, RECIPES, Override
from kernels.backends import NodeClass

MIN_BLOCKS = 6
"""With fewer, an exact two-sided sign-flip test cannot reject at 5 %."""
MAX_BLOCKS = 2000
MAX_VARIANTS = 64
MAX_SEEDS = 64
MAX_LABELS = 32
MAX_REQUIREMENTS = 32
NAME_PATTERN = "^[a-z0-9][a-z0-9-]{0,62}$"
LABEL_PATTERN = "^[a-z0-9][a-z0-9_.-]{0,62}$"
PERCENT_PATTERN = r"^(0\.[0-9]{0,3}[1-9][0-9]{0,3}|[1-9][0-9]?(\.[0-9]{1,4})?)%$"
DURATION_PATTERN = "^([1-9][0-9]{0,3}s|[1-9][0-9]{0,2}m|([1-9]|1[0-9]|2[0-4])h)$"

_UNPRINTABLE = "\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029\\u202a-\\u202e\\u2066-\\u2069\\ud800-\\udfff"
_CONTROL = re.compile(f"[{_UNPRINTABLE}]")
_NAME = re.compile(NAME_PATTERN)
_LABEL = re.compile(LABEL_PATTERN)
_PERCENT = re.compile(PERCENT_PATTERN)
_DURATION = re.compile(DURATION_PATTERN)
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def _refuse(detail: str, hint: str | None = None) -> PydanticCustomError:
    escaped = detail.replace("{", "{{").replace("}", "}}")
    return PydanticCustomError("spec", escaped, {"hint": hint})  # type: ignore[arg-type]  # text is ours, not literal


def _raise_all(title: str, found: list[tuple[str, PydanticCustomError, object]]) -> None:
    if found:
        lines = [InitErrorDetails(type=error, loc=(name,), input=given) for name, error, given in found]
        raise ValidationError.from_exception_data(title, lines)


def _name(value: object) -> object:
    if isinstance(value, str) and not _full(_NAME, value):
        rule = "1 to 63 of a-z, 0-9 and '-', beginning with a letter or digit"
        raise _refuse(f"name {shown(value)} is not allowed; allowed: {rule}")
    return value


def _full(pattern: re.Pattern[str], value: str) -> bool:
    return pattern.match(value) is not None and not value.endswith("\n")


def _printable(value: str) -> str:
    bad = _CONTROL.search(value)
    if bad:
        hint = "write it on one line (in YAML: >- instead of > or |)" if bad.group() == "\n" else "remove it"
        raise _refuse(f"control character U+{ord(bad.group()):04X} at position {bad.start()} is not allowed", hint)
    return value


def _percent(value: object) -> object:
    if isinstance(value, str) and _full(_PERCENT, value):
        return float(value[:-1])
    raise _refuse(
        f"{shown(value)} is not a percentage; allowed: text such as '0.5%', above 0% and below 100%",
        "write the unit: 0.5%" if not isinstance(value, str) else None,
    )


def _duration(value: object) -> object:
    if isinstance(value, str) and _full(_DURATION, value):
        return int(value[:-1]) * _SECONDS[value[-1]]
    raise _refuse(
        f"{shown(value)} is not a duration; allowed: text such as '90s', '20m' or '1h', up to 24h",
        "write the unit: 20m" if not isinstance(value, str) else None,
    )


def _show_percent(value: float) -> str:
    return f"{value:.4f}".rstrip("0").rstrip(".") + "%"


Name: TypeAlias = Annotated[
    str, BeforeValidator(_name), WithJsonSchema({"type": "string", "pattern": NAME_PATTERN, "maxLength": 63})
]
Percent: TypeAlias = Annotated[
    float,
    BeforeValidator(_percent),
    PlainSerializer(_show_percent),
    WithJsonSchema({"type": "string", "pattern": PERCENT_PATTERN, "examples": ["0.5%"]}),
]
"""Percent as a number; written with its sign, "0.5%"."""
Seconds: TypeAlias = Annotated[
    int,
    BeforeValidator(_duration),
    PlainSerializer(lambda value: f"{value}s"),
    WithJsonSchema({"type": "string", "pattern": DURATION_PATTERN, "examples": ["20m"]}),
]
"""Whole seconds; written with a unit, "20m"."""


def _check_gates(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    found: list[tuple[str, PydanticCustomError, object]] = []
    for name, given in value.items():
        gate = GATES.get(name)
        if gate is None:
            detail = f"unknown gate {shown(name)}; known: {listed(GATES)}"
            found.append((str(name), _refuse(detail, nearest(str(name), GATES)), given))
        elif not gate.allows(given):
            allowed = listed(show(known) for known in gate.values)
            found.append((name, _refuse(f"gate '{name}' is {shown(given)}; allowed: {allowed}"), given))
    _raise_all("gates", found)
    return value


def _gates_schema() -> dict[str, Any]:
    properties = {
        gate.name: {
            "description": gate.question,
            "enum": [value for value in gate.values if runs_on(gate, value)],
            "default": gate.default,
        }
        for gate in GATES.values()
    }
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _check_overrides(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    found: list[tuple[str, PydanticCustomError, object]] = []
    checked: dict[str, Any] = {}
    for name, given in value.items():
        key = OVERRIDES.get(name)
        if key is None:
            hint = f"'{name}' is a gate: put it under gates" if name in GATES else nearest(str(name), OVERRIDES)
            detail = f"unknown override {shown(name)}; known: {listed(OVERRIDES)}"
            found.append((str(name), _refuse(detail, hint), given))
        elif problem := _override_problem(key, given):
            found.append((name, _refuse(f"override '{name}' is {shown(given)}; allowed: {problem}"), given))
        else:
            checked[name] = float(given) if key.kind is float else given
    _raise_all("overrides", found)
    return checked


def _override_problem(key: Override, given: Any) -> str | None:
    if key.kind is str:
        fits = isinstance(given, str) and _full(re.compile(str(key.pattern)), given)
        return None if fits else f"{key.description} (text matching {key.pattern})"
    number = "an integer" if key.kind is int else "a number"
    types = (int,) if key.kind is int else (int, float)
    if type(given) not in types or not math.isfinite(given) or not key.minimum <= given <= key.maximum:  # type: ignore[operator]
        return f"{number} from {key.minimum:g} to {key.maximum:g}"
    return None


def _overrides_schema() -> dict[str, Any]:
    kinds = {int: "integer", float: "number", str: "string"}
    properties: dict[str, Any] = {}
    for name, key in OVERRIDES.items():
        limits = {"minimum": key.minimum, "maximum": key.maximum, "pattern": key.pattern}
        given = {limit: value for limit, value in limits.items() if value is not None}
        properties[name] = {"type": kinds[key.kind], "description": key.description, **given}
    return {"type": "object", "properties": properties, "additionalProperties": False}


GateChoices: TypeAlias = Annotated[dict[str, GateValue], BeforeValidator(_check_gates), WithJsonSchema(_gates_schema())]
Overrides: TypeAlias = Annotated[
    dict[str, int | float | str], BeforeValidator(_check_overrides), WithJsonSchema(_overrides_schema())
]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Steps(_Part):
    """Optimiser steps of one trial: step 0 (compilation), warm-up, then the timed window."""

    warmup: int = Field(default=3, ge=0, le=10_000, description="Steps after step 0 that are recorded, not timed.")
    timed: int = Field(default=10, ge=1, le=10_000, description="Steps of the measured window.")
    val_rows: int = Field(default=8, ge=0, le=65_536, description="Validation rows evaluated after the last step.")


class Workload(_Part):
    """What every arm trains."""

    recipe: Annotated[str, Field(description="A named, versioned configuration.", json_schema_extra={"enum": [*RECIPES]})]
    overrides: Overrides = Field(default_factory=dict, description="Values changed in the recipe, for every arm.")
    steps: Steps = Field(default_factory=Steps)

    @field_validator("recipe")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in RECIPES:
            raise _refuse(f"unknown recipe {shown(value)}; known: {listed(RECIPES)}", nearest(value, RECIPES))
        return value


class ArmSpec(_Part):
    """One arm: gates by name; a gate that is not named keeps the value of the baseline or the recipe."""

    gates: GateChoices = Field(default_factory=dict)


class VariantSpec(_Part):
    """One variant: the gates in which it differs from the baseline."""

    gates: Annotated[GateChoices, Field(min_length=1)]


class Blocks(_Part):
    """How many blocks: a fixed count. (A schedule of looks is reserved.)"""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["count"]}, {"required": ["looks"]}], "properties": None}
    )

    count: int | None = Field(default=None, ge=MIN_BLOCKS, le=MAX_BLOCKS)
    looks: tuple[Annotated[int, Field(ge=MIN_BLOCKS, le=MAX_BLOCKS)], ...] | None = Field(default=None, min_length=1)

    @field_validator("looks")
    @classmethod
    def _one_look(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and len(value) > 1:
            raise _refuse("adaptive looks are not available yet; use {count: N}", f"use {{count: {value[-1]}}}")
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> "Blocks":
        if (self.count is None) == (self.looks is None):
            raise _refuse("give exactly one of 'count' and 'looks'", f"use {{count: {MIN_BLOCKS}}}")
        return self

    @property
    def number(self) -> int:
        """Blocks that will run."""
        return self.looks[-1] if self.looks else int(self.count or 0)


class Design(_Part):
    """Seeds, number of blocks and the seed of the running order."""

    seeds: Annotated[
        tuple[Annotated[int, Field(ge=0, le=2**53 - 1)], ...],
        Field(min_length=1, max_length=MAX_SEEDS, json_schema_extra={"uniqueItems": True}),
    ] = Field(default=(1,), description="Training seeds; blocks cycle through them.")
    blocks: Blocks = Field(description="Number of blocks; each holds every arm once.")
    order_seed: int = Field(default=0, ge=0, le=2**53 - 1, description="Seed of the balanced random running order.")

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        twice = next((seed for seed in value if value.count(seed) > 1), None)
        if twice is not None:
            raise _refuse(f"seed {twice} is listed more than once", "list each seed once; blocks cycle through them")
        return value


class Placement(_Part):
    """Where the trials run."""

    node_class: Annotated[str, Field(json_schema_extra={"enum": [str(node) for node in NodeClass]})]
    devices: Annotated[int, Field(json_schema_extra={"const": 1})] = 1

    @field_validator("node_class")
    @classmethod
    def _known(cls, value: str) -> str:
        names = [str(node) for node in NodeClass]
        if value not in names:
            raise _refuse(f"unknown node class {shown(value)}; known: {listed(names)}", nearest(value, names))
        return value

    @field_validator("devices")
    @classmethod
    def _one(cls, value: int) -> int:
        if value != 1:
            raise _refuse(f"{value} devices for one trial are not available yet; allowed: 1", "use devices: 1")
        return value


class Limits(_Part):
    """Budgets of the ablation and its place in the queue."""

    trial: Seconds = Field(default=1200, description="Wall time after which one trial is stopped.", validate_default=False)
    device_minutes: float = Field(default=180.0, gt=0, le=1_000_000, description="Budget of the whole ablation.")
    priority: int = Field(default=50, ge=0, le=100, description="Higher runs first.")


class Primary(_Part):
    """The metric that decides, with its practical margin."""

    metric: Annotated[str, Field(json_schema_extra={"enum": [*PRIMARY_METRICS]})] = "tokens_per_s"
    margin: Percent = Field(description="Differences within this margin count as the same.")
    adopt_if: Percent | None = Field(default=None, description="Improvement from which a variant is adopted.")

    @field_validator("metric")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in PRIMARY_METRICS:
            detail = f"metric {shown(value)} cannot be primary; allowed: {listed(PRIMARY_METRICS)}"
            raise _refuse(detail, nearest(value, PRIMARY_METRICS))
        return value

    @field_validator("adopt_if")
    @classmethod
    def _beyond_margin(cls, value: float | None, info: Any) -> float | None:
        margin = info.data.get("margin")
        if value is not None and margin is not None and value < margin:
            detail = f"adopt_if {_show_percent(value)} is below the margin {_show_percent(margin)}"
            raise _refuse(detail, "adopt_if must be at least the margin")
        return value

    @property
    def threshold_pct(self) -> float:
        """Improvement in percent from which a variant may be adopted."""
        return self.margin if self.adopt_if is None else self.adopt_if


class Requirement(_Part):
    """One condition on a variant besides the primary metric: exactly one of max_delta, max_value and rule."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": [key]} for key in ("max_delta", "max_value", "rule")]}
    )

    metric: Annotated[str, Field(json_schema_extra={"enum": [n for n, m in METRICS.items() if m.kind != "ratio"]})]
    max_delta: float | None = Field(default=None, ge=0, le=1e9, description="Allowed rise over the baseline, in its unit.")
    max_value: float | None = Field(default=None, gt=0, le=1e9, description="Absolute budget, in the metric's unit.")
    rule: Literal["identical", "envelope", "as_claimed"] | None = Field(
        default=None,
        description="For losses: bit-identical, within the spread of baseline repeats, or what the gates claim.",
    )
    tolerance: float = Field(default=1e-3, ge=0, le=100, description="Smallest envelope, in nats.")

    @field_validator("metric")
    @classmethod
    def _known(cls, value: str) -> str:
        allowed = [name for name, metric in METRICS.items() if metric.kind != "ratio"]
        if value not in allowed:
            detail = f"metric {shown(value)} cannot be required; allowed: {listed(allowed)}"
            raise _refuse(detail, nearest(value, allowed))
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> "Requirement":
        given = [key for key in ("max_delta", "max_value", "rule") if getattr(self, key) is not None]
        if len(given) != 1:
            raise _refuse(f"give exactly one of max_delta, max_value and rule; given: {listed(given)}")
        if self.rule and METRICS[self.metric].kind != "loss":
            raise _refuse(f"rule '{self.rule}' is for losses; '{self.metric}' takes max_delta or max_value")
        return self


class VerdictRule(_Part):
    """The rule that is hashed before the first sample."""

    primary: Primary
    require: tuple[Requirement, ...] = Field(default=(), max_length=MAX_REQUIREMENTS)


def _labels(value: dict[str, str]) -> dict[str, str]:
    found = [(key, _refuse(f"label {shown(key)} is not allowed; allowed: keys matching {LABEL_PATTERN}"), text)
             for key, text in value.items() if not _full(_LABEL, key)]  # fmt: skip
    _raise_all("labels", [(key, error, text) for key, error, text in found])
    return value


_TEXT_PATTERN = f"^[^{_UNPRINTABLE}]+$".replace("\\x", "\\u00")
_LABELS_SCHEMA = {
    "type": "object",
    "maxProperties": MAX_LABELS,
    "propertyNames": {"pattern": LABEL_PATTERN},
    "additionalProperties": {"type": "string", "maxLength": 200, "pattern": _TEXT_PATTERN.replace("+$", "*$")},
}


class AblationSpec(_Part):
    """A complete ablation: workload, baseline, variants, design, placement, limits and the verdict rule."""

    ablation: Name = Field(description="Name of the ablation.")
    question: Annotated[str, AfterValidator(_printable), Field(min_length=1, max_length=500)] = Field(
        description="The question that the verdict answers, on one line.", json_schema_extra={"pattern": _TEXT_PATTERN}
    )
    workload: Workload
    baseline: ArmSpec = Field(default_factory=ArmSpec, description="The arm that variants are compared with.")
    variants: Annotated[
        dict[Name, VariantSpec],
        Field(min_length=1, max_length=MAX_VARIANTS, json_schema_extra={"propertyNames": {"pattern": NAME_PATTERN}}),
    ] = Field(description="Arms by name, each with the gates in which it differs from the baseline.")
    design: Design
    placement: Placement
    limits: Limits = Field(default_factory=Limits)
    verdict: VerdictRule
    labels: Annotated[
        dict[str, Annotated[str, AfterValidator(_printable), Field(max_length=200)]],
        AfterValidator(_labels),
        Field(max_length=MAX_LABELS),
        WithJsonSchema(_LABELS_SCHEMA),
    ] = Field(default_factory=dict, description="Free key-value pairs to filter by.")

    @field_validator("variants")
    @classmethod
    def _not_baseline(cls, value: dict[str, VariantSpec]) -> dict[str, VariantSpec]:
        if "baseline" in value:
            _raise_all("variants", [("baseline", _refuse("a variant cannot be named 'baseline'"), None)])
        return value

    @cached_property
    def digest(self) -> str:
        """Digest of the canonical JSON of the whole spec: equal for equal YAML, JSON and TOML."""
        return digest(self.model_dump(mode="json"))


def ablation_json_schema() -> dict[str, Any]:
    """Return the published JSON Schema (draft 2020-12) of a spec.

    Gate values that no node class can run today are left out of the enums: the schema describes what is accepted.
    """
    schema = AblationSpec.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
