"""Types of single values in a spec: names, percents, durations, texts, gates, overrides and labels.

Each type validates itself, reports all problems, and carries its published JSON Schema.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StrictBool,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from ablate.experiments.design.gate import Gate, GateValue, show
from ablate.experiments.design.gates import GATES
from ablate.experiments.design.problems import listed, nearest, shown
from ablate.experiments.design.recipes import OVERRIDES, RECIPES, Override
from ablate.experiments.documents import Frozen
from ablate.experiments.kernel_pattern import MAX_PATTERN, KernelPattern, PatternError

NAME_PATTERN = "^[a-z0-9][a-z0-9-]{0,62}$"
LABEL_PATTERN = "^[a-z0-9][a-z0-9_.-]{0,62}$"
NO_MARGIN = "0%"
"""Margin of metrics without noise, where every change counts."""
PERCENT_PATTERN = r"^(0\.[0-9]{0,3}[1-9][0-9]{0,3}|[1-9][0-9]?(\.[0-9]{1,4})?)%$"
PERCENT = "%"
AMOUNT_PATTERN = "^([0-9]{1,9}(?:\\.[0-9]{1,9})?) ([A-Za-z][A-Za-z/]{0,15})$"
"""A number with a unit."""
TARGET_PATTERN = "^[0-9]{1,9}(\\.[0-9]{1,9})? nats$"
MOST_DIFFERENCE = 1e9
DURATION_PATTERN = "^([1-9][0-9]{0,3}s|[1-9][0-9]{0,2}m|([1-9]|1[0-9]|2[0-4])h)$"
MAX_LABELS = 32
MAX_ARMS = 65
"""The baseline and the most variants of a spec."""
MOST_LETTERS = 40
"""Of the name of a Python environment or of a package's recipe: blocks store it in a lane of 64 letters."""

_UNPRINTABLE = "\\u0000-\\u001f\\u007f-\\u009f\\u2028\\u2029\\u202a-\\u202e\\u2066-\\u2069"
_CONTROL = re.compile(f"[{_UNPRINTABLE}\\ud800-\\udfff]")
_NAME = re.compile(NAME_PATTERN)
_LABEL = re.compile(LABEL_PATTERN)
_PERCENT = re.compile(PERCENT_PATTERN)
_AMOUNT = re.compile(AMOUNT_PATTERN)
_DURATION = re.compile(DURATION_PATTERN)
_SECONDS = {"s": 1, "m": 60, "h": 3600}


class SpecPart(Frozen):
    """A part of a spec: values have exactly the declared types."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


def without_null(schema: dict[str, Any], *names: str) -> None:
    """Publish optional keys as present or absent, never null."""
    for name in names:
        entry = schema["properties"][name]
        present = [option for option in entry.pop("anyOf") if option != {"type": "null"}]
        entry.pop("default", None)
        entry.update(present[0] if len(present) == 1 else {"anyOf": present})


def is_none(value: object) -> bool:
    """Return whether an optional key is absent."""
    return value is None


def refuse(detail: str, hint: str | None = None) -> PydanticCustomError:
    """Return the error that a validator raises for `detail`; braces in it stay as they are, except `{hint}`."""
    return PydanticCustomError("spec", detail, {"hint": hint})


def one_of(value: str, allowed: Collection[str], sentence: str, labels: Mapping[str, str] | None = None) -> str:
    """Return `value` if it is allowed; otherwise raise `sentence` with the allowed names and the nearest as hint."""
    if value not in allowed:
        raise refuse(f"{sentence}: {listed(allowed)}", nearest(value, allowed, labels))
    return value


Problem: TypeAlias = tuple[str | tuple[str | int, ...], PydanticCustomError, object]
"""(key or path, error, input) of an illegal value."""
Problems: TypeAlias = list[Problem]


def raise_all(errors: Sequence[Problem]) -> None:
    """Raise one ValidationError of all (key or path, error, input); return when there is none."""
    if errors:
        lines = [
            InitErrorDetails(type=error, loc=where if isinstance(where, tuple) else (where,), input=value)
            for where, error, value in errors
        ]
        raise ValidationError.from_exception_data("spec", lines)


def _name(value: object) -> object:
    if isinstance(value, str) and not _full(_NAME, value):
        rule = "1 to 63 of a-z, 0-9 and '-', beginning with a letter or digit"
        raise refuse(f"name {shown(value)} is not allowed; allowed: {rule}")
    return value


def _full(pattern: re.Pattern[str], value: str) -> bool:
    return pattern.match(value) is not None and not value.endswith("\n")


def _printable(value: str) -> str:
    bad = _CONTROL.search(value)
    if bad:
        hint = "write it on one line (in YAML: >- instead of > or |)" if bad.group() == "\n" else "remove it"
        raise refuse(f"control character U+{ord(bad.group()):04X} at position {bad.start()} is not allowed", hint)
    return value


def _percent(value: object, least: str = "above 0%") -> float:
    if isinstance(value, str) and _full(_PERCENT, value):
        return float(value[:-1])
    detail = f"{shown(value)} is not a percentage; allowed: text such as '0.5%', {least} and below 100%"
    raise refuse(detail, _with_percent(str(value)))


def _with_percent(number: str) -> str | None:
    """Suggest percentages for a number without a percent sign."""
    shares = [text for text in (f"{number}%", _as_share(number)) if text and _full(_PERCENT, text)]
    return f"write the unit: {', or as a share of 1: '.join(shares)}" if shares else None


def _as_share(number: str) -> str | None:
    try:
        return show_percent(100 * float(number)) if float(number) < 1 else None
    except ValueError:
        return None


@dataclass(frozen=True)
class Difference:
    """A difference from the baseline: in percent of its value, or in the metric's unit."""

    value: float
    unit: str
    """PERCENT, a unit as written, or "" for the metric's unit."""

    def __str__(self) -> str:
        """Write the difference as in a spec."""
        if self.unit == PERCENT:
            return show_percent(self.value)
        return f"{self.value:g}" + (f" {self.unit}" if self.unit else "")

    @property
    def relative(self) -> bool:
        """Whether it is a share of the baseline's value."""
        return self.unit == PERCENT


def _gain(value: object, least: str = "above 0%") -> object:
    """Read "0.5%" or "0.005 nats"."""
    if isinstance(value, Difference):
        return value
    written = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
    if written is None:
        return Difference(_percent(value, least), PERCENT)
    return _checked(float(written[1]), written[2], value)


def _bound(value: object) -> object:
    """Read "0.5%", "0.005 nats" or a number in the metric's unit."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _gain(value)
    return _checked(float(value), "", value)


def _checked(number: float, unit: str, written: object) -> Difference:
    if not 0 < number <= MOST_DIFFERENCE:
        raise refuse(f"{shown(written)} is not above 0 and at most {MOST_DIFFERENCE:g}")
    return Difference(number, unit)


def _target(value: object) -> object:
    """Read "3.2 nats"."""
    if isinstance(value, Difference):
        return value
    written = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
    if written is None or written[2] != "nats":
        raise refuse(f"{shown(value)} is no loss; allowed: text such as '3.2 nats'")
    return _checked(float(written[1]), written[2], value)


def _margin(value: object) -> object:
    return Difference(0.0, PERCENT) if value == NO_MARGIN else _gain(value, f"from {NO_MARGIN}")


def _written(value: Difference) -> str | float:
    """Return a difference as it stands in a document."""
    return value.value if not value.unit else str(value)


def _duration(value: object) -> object:
    if isinstance(value, str) and _full(_DURATION, value):
        return int(value[:-1]) * _SECONDS[value[-1]]
    seconds = f"{value}s"
    raise refuse(
        f"{shown(value)} is not a duration; allowed: text such as '90s', '20m' or '1h', up to 24h",
        f"write the unit: {seconds}" if _full(_DURATION, seconds) else None,
    )


def _show_duration(seconds: int) -> str:
    """Write a duration as in a spec, in the smallest unit that its pattern allows."""
    if seconds < 10_000:
        return f"{seconds}s"
    return f"{seconds // 60}m" if seconds < 60_000 else f"{seconds // 3600}h"


def number_in(unit: str, value: object) -> object:
    """Return `value` if it is a number; otherwise reject it and name the unit."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refuse(f"{shown(value)} is not a number; allowed: a number alone, in {unit}")
    return value


def show_percent(value: float) -> str:
    """Write a percent as in a spec: 0.5%."""
    return f"{value:.4f}".rstrip("0").rstrip(".") + "%"


Name: TypeAlias = Annotated[
    str, BeforeValidator(_name), WithJsonSchema({"type": "string", "pattern": NAME_PATTERN, "maxLength": 63})
]
Percent: TypeAlias = Annotated[
    float,
    BeforeValidator(_percent),
    PlainSerializer(show_percent),
    WithJsonSchema({"type": "string", "pattern": PERCENT_PATTERN, "examples": ["0.5%"]}),
]
"""Percent as a number; written with a percent sign, "0.5%"."""
Margin: TypeAlias = Annotated[
    Difference,
    BeforeValidator(_margin),
    PlainSerializer(_written),
    WithJsonSchema(
        {"type": "string", "pattern": f"{PERCENT_PATTERN}|^{NO_MARGIN}$|{AMOUNT_PATTERN}", "examples": ["0.5%"]}
    ),
]
"""A percent that may be zero, or an amount with its unit: "0.5%", "0.005 nats"."""
Gain: TypeAlias = Annotated[
    Difference,
    BeforeValidator(_gain),
    PlainSerializer(_written),
    WithJsonSchema({"type": "string", "pattern": f"{PERCENT_PATTERN}|{AMOUNT_PATTERN}", "examples": ["0.5%"]}),
]
"""An improvement: a percent, or an amount with its unit."""
Target: TypeAlias = Annotated[
    Difference,
    BeforeValidator(_target),
    PlainSerializer(_written),
    WithJsonSchema({"type": "string", "pattern": TARGET_PATTERN, "examples": ["3.2 nats"]}),
]
"""A loss in nats: "3.2 nats"."""
Bound: TypeAlias = Annotated[
    Difference,
    BeforeValidator(_bound),
    PlainSerializer(_written),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": f"{PERCENT_PATTERN}|{AMOUNT_PATTERN}"},
                {"type": "number", "exclusiveMinimum": 0, "maximum": MOST_DIFFERENCE},
            ],
            "examples": [0.05, "0.5%"],
        }
    ),
]
"""A percent, an amount with its unit, or a number in the metric's unit."""
Seconds: TypeAlias = Annotated[
    int,
    BeforeValidator(_duration),
    PlainSerializer(_show_duration),
    WithJsonSchema({"type": "string", "pattern": DURATION_PATTERN, "examples": ["20m"]}),
]
"""Whole seconds; written with a unit, "20m"."""


PACKAGE = {"package": True}
"""Validation context of a spec whose recipe is not built in: its gates and overrides are checked when the arms are
resolved (`ablate.experiments.design.kinds.package`): the spec can also be read where the package is not installed."""


def of_a_package(info: ValidationInfo) -> bool:
    """Say whether the spec's recipe is not built in."""
    return info.context == PACKAGE


def gate_refusal(name: object, value: object) -> tuple[str, str | None] | None:
    """Return why no gate of this name can have this value, and a hint; None if one can."""
    gate = GATES.get(str(name))
    if gate is None:
        return f"unknown gate {shown(name)}; known: {listed(GATES)}", nearest(str(name), GATES)
    if gate.allows(value):
        return None
    detail = f"gate '{name}' is {shown(value)}; allowed: {listed(map(show, gate.values))}"
    return detail, nearest(str(value), map(show, gate.values))


def _check_gates(value: object, info: ValidationInfo) -> object:
    if not isinstance(value, Mapping) or of_a_package(info):
        return value
    errors: Problems = []
    for name, setting in value.items():
        refusal = gate_refusal(name, setting)
        if refusal is not None:
            errors.append((str(name), refuse(*refusal), setting))
    raise_all(errors)
    return value


def _gates_schema(minimum: int) -> dict[str, Any]:
    properties = {
        gate.name: {
            "description": gate.question,
            "enum": [value for value in gate.values if gate.node_classes(value)],
            **_default(gate),
        }
        for gate in GATES.values()
    }
    return {"type": "object", "properties": properties, "additionalProperties": False, "minProperties": minimum}


def _default(gate: Gate) -> dict[str, GateValue]:
    """Return a gate's default where all recipes have the same."""
    values = {gate.read(recipe.config) for recipe in RECIPES.values()}
    return {"default": values.pop()} if len(values) == 1 else {}


def _check_overrides(value: object, info: ValidationInfo) -> object:
    if not isinstance(value, Mapping) or of_a_package(info):
        return value
    errors: Problems = []
    checked: dict[str, Any] = {}
    for name, setting in value.items():
        key = OVERRIDES.get(name)
        if key is None:
            hint = f"'{name}' is a gate: put it under gates" if name in GATES else nearest(str(name), OVERRIDES)
            detail = f"unknown override {shown(name)}; known: {listed(OVERRIDES)}"
            errors.append((str(name), refuse(detail, hint), setting))
        elif problem := _override_problem(key, setting):
            errors.append((name, refuse(f"override '{name}' is {shown(setting)}; allowed: {problem}"), setting))
        else:
            checked[name] = float(setting) if key.kind is float else setting
    raise_all(errors)
    return checked


def _override_problem(key: Override, value: Any) -> str | None:
    if key.kind is str:
        fits = isinstance(value, str) and _full(re.compile(str(key.pattern)), value)
        return None if fits else f"{key.description} (text matching {key.pattern})"
    number = "an integer" if key.kind is int else "a number"
    types = (int,) if key.kind is int else (int, float)
    if type(value) not in types or not math.isfinite(value) or not key.minimum <= value <= key.maximum:
        return f"{number} from {key.minimum:g} to {key.maximum:g}"
    return None


def _overrides_schema() -> dict[str, Any]:
    kinds = {int: "integer", float: "number", str: "string"}
    properties: dict[str, Any] = {}
    for name, key in OVERRIDES.items():
        limits = {"minimum": key.minimum, "maximum": key.maximum, "pattern": key.pattern}
        limits = {limit: value for limit, value in limits.items() if value is not None}
        properties[name] = {"type": kinds[key.kind], "description": key.description, **limits}
    return {"type": "object", "properties": properties, "additionalProperties": False}


_Gates: TypeAlias = Annotated[dict[str, GateValue], BeforeValidator(_check_gates)]
BaselineGates: TypeAlias = Annotated[_Gates, WithJsonSchema(_gates_schema(0))]
VariantGates: TypeAlias = Annotated[_Gates, Field(min_length=1), WithJsonSchema(_gates_schema(1))]
Overrides: TypeAlias = Annotated[
    dict[str, bool | int | float | str], BeforeValidator(_check_overrides), WithJsonSchema(_overrides_schema())
]


def _labels(value: dict[str, str]) -> dict[str, str]:
    rule = "allowed: 1 to 63 of a-z, 0-9, '.', '_' and '-', beginning with a letter or digit"
    bad = [key for key in value if not _full(_LABEL, key)]
    raise_all([(key, refuse(f"label {shown(key)} is not allowed; {rule}"), value[key]) for key in bad])
    return value


TEXT_PATTERN = f"^[^{_UNPRINTABLE}]+$"
Text: TypeAlias = Annotated[str, AfterValidator(_printable)]
"""One line without control characters."""
Labels: TypeAlias = Annotated[
    dict[str, Annotated[Text, Field(max_length=200)]],
    Field(max_length=MAX_LABELS),
    AfterValidator(_labels),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MAX_LABELS,
            "propertyNames": {"pattern": LABEL_PATTERN},
            "additionalProperties": {"type": "string", "maxLength": 200, "pattern": TEXT_PATTERN.replace("+$", "*$")},
        }
    ),
]


def _check_patterns(value: object) -> object:
    patterns = value if isinstance(value, Mapping) else {value: 1}
    if not patterns or len(patterns) > MAX_REQUIRED:
        raise refuse(f"has {len(patterns)} patterns; allowed: 1 to {MAX_REQUIRED}")
    for pattern, calls in patterns.items():
        if not isinstance(pattern, str) or type(calls) is not int or not 0 <= calls <= MOST_CALLS:
            allowed = f"a pattern, or {{pattern: number of calls in a step, from 0 to {MOST_CALLS:,}}}"
            raise refuse(f"{shown(value)} is not allowed; allowed: {allowed}", '{"flash_.*": 28, "gemm_naive": 0}')
        try:
            KernelPattern(pattern)
        except PatternError as error:
            raise refuse(f"pattern {shown(pattern)} {error}") from None
    return value


MAX_REQUIRED, MOST_CALLS = 16, 1_000_000
"""Most patterns or points of an arm, and most calls of a kernel in a step."""
_Pattern: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_PATTERN)]
_Calls: TypeAlias = dict[_Pattern, Annotated[int, Field(ge=0, le=MOST_CALLS)]]
_by_arm = Field(max_length=MAX_ARMS, json_schema_extra={"propertyNames": {"pattern": NAME_PATTERN}})
RequiredKernels: TypeAlias = Annotated[
    dict[Name, Annotated[_Pattern | _Calls, BeforeValidator(_check_patterns)]], _by_arm
]
"""By arm, a pattern, or calls in a step by pattern."""
_Point: TypeAlias = Annotated[str, Field(pattern=f"^[^{_UNPRINTABLE}]{{1,63}}$")]
RequiredLive: TypeAlias = Annotated[
    dict[Name, Annotated[dict[_Point, StrictBool], Field(min_length=1, max_length=MAX_REQUIRED)]], _by_arm
]
"""By arm, whether the program calls `ablate.live` with a name."""
