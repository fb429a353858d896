"""AblationSpec, the model of a submitted spec: YAML, JSON and TOML load into it, and unknown keys are errors.

It checks single values. The plan checks values together: a gate that a node class lacks, a variant equal to the
baseline. A change of a Field's description also changes the published JSON Schema.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ModelWrapValidatorHandler, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from experiments.design.metrics import (
    EXACT_METRICS,
    LOSS_METRICS,
    METRIC_LABELS,
    METRICS,
    PAIRED_METRICS,
    PRIMARY_METRICS,
    REQUIRED_METRICS,
    declared_metric,
)
from experiments.design.packages import installed
from experiments.design.power import MAX_BLOCKS, SESSION_ALPHA, alpha_of
from experiments.design.problems import listed, shown
from experiments.design.spec_values import (
    NAME_PATTERN,
    NO_MARGIN,
    PERCENT_PATTERN,
    TEXT_PATTERN,
    Labels,
    Margin,
    Name,
    Percent,
    Problems,
    Seconds,
    Text,
    number_in,
    one_of,
    raise_all,
    refuse,
    show_percent,
)
from experiments.design.workload import (
    NOT_OURS,
    ArmSpec,
    SpecPart,
    VariantSpec,
    Workload,
    is_declarable,
    without_null,
)
from experiments.digest import digest
from experiments.outcomes import BASELINE
from kernels.backends import NODE_CLASSES
from model.measurements import Metric

MIN_BLOCKS = 6
"""With fewer blocks, an exact two-sided sign-flip test cannot reject at 5 %."""
AUTO = "auto"
"""Value of `design.blocks` that leaves the number of blocks to the measured noise."""
MAX_LOOKS = 16
MIN_EXACT_BLOCKS = 2
"""Fewest blocks where an exact metric decides: one repeat shows that it is exact."""
COMPARED_WITH_REPEATS = frozenset({"envelope", "as_claimed"})
"""Rules of a requirement that compare a loss with baseline repeats of the same seed."""
MAX_VARIANTS = 64
MAX_SEEDS = 64
MAX_REQUIREMENTS = 32
MAX_KEPT = 1000
"""Most proposals of one session that can be kept."""


def _primary_schema(schema: dict[str, Any]) -> None:
    """Publish the margins that each metric allows."""
    paired = {
        "properties": {"metric": {"enum": [*PAIRED_METRICS]}, "margin": {"type": "string", "pattern": PERCENT_PATTERN}}
    }
    directed = [name for name in EXACT_METRICS if METRICS[name].better]
    exact = {"required": ["metric"], "properties": {"metric": {"enum": directed}}}
    loss = {
        "required": ["metric"],
        "properties": {
            "metric": {"enum": [*LOSS_METRICS]},
            "margin": {"const": NO_MARGIN},
            "adopt_if": {"type": "null"},
        },
    }
    declared = {
        "required": ["metric"],
        "properties": {"metric": NOT_OURS, "margin": {"type": "string", "pattern": PERCENT_PATTERN}},
    }
    schema["oneOf"] = [paired, exact, loss, declared]


def _requirement_schema(schema: dict[str, Any]) -> None:
    """Publish that a requirement has exactly one bound, and the metrics that take a rule."""
    without_null(schema, "max_delta", "max_value", "rule", "margin")
    ours, loss = ({"properties": {"metric": {"enum": [*names]}}} for names in (REQUIRED_METRICS, LOSS_METRICS))
    schema["oneOf"] = [
        {"required": ["max_delta"], **ours},
        {"required": ["max_value"], **ours},
        {"required": ["rule"], **loss},
        {"required": ["margin"], "properties": {"metric": NOT_OURS}},
    ]


def _ours_or_declared(names: Sequence[str]) -> dict[str, Any]:
    return {"anyOf": [{"enum": [*names]}, NOT_OURS]}


def _nested(schema: dict[str, Any], *path: str) -> dict[str, Any]:
    """Return the schema of a mapping whose value at `path`, if present, has `schema`."""
    for name in reversed(path):
        schema = {"properties": {name: schema}}
    return schema


def _blocks_schema(schema: dict[str, Any]) -> None:
    without_null(schema, "count", "looks")
    schema["properties"]["looks"] |= {"maxItems": MAX_LOOKS, "uniqueItems": True}
    schema["oneOf"] = [{"required": ["count"]}, {"required": ["looks"]}]


def _or_auto(schema: dict[str, Any]) -> None:
    schema["anyOf"] = [{"const": AUTO}, {"$ref": schema.pop("$ref")}]


def _whole_schema(schema: dict[str, Any]) -> None:
    """Publish two rules: only an exact metric may decide after few blocks; only a command has declared metrics."""
    enough = _nested({"minimum": MIN_BLOCKS}, "design", "blocks", "count")
    exact = _nested(
        {"required": ["metric"], "properties": {"metric": {"enum": [*EXACT_METRICS]}}}, "verdict", "primary"
    )
    schema["anyOf"] = [enough, exact]
    required = {"items": {"properties": {"metric": {"enum": [*REQUIRED_METRICS]}}}}
    schema["if"] = {"properties": {"workload": {"required": ["recipe"]}}}
    schema["then"] = {
        "allOf": [
            _nested({"enum": [*PRIMARY_METRICS]}, "verdict", "primary", "metric"),
            _nested(required, "verdict", "require"),
        ]
    }


class Blocks(SpecPart):
    """Number of blocks: a count, a schedule of looks at which the ablation may answer and stop, or `auto`."""

    model_config = ConfigDict(json_schema_extra=_blocks_schema)

    count: int | None = Field(
        default=None,
        ge=MIN_EXACT_BLOCKS,
        le=MAX_BLOCKS,
        description=f"A fixed number: {MIN_BLOCKS} or more, or two for every seed where an exact metric decides.",
    )
    looks: Annotated[
        tuple[Annotated[int, Field(ge=MIN_BLOCKS, le=MAX_BLOCKS)], ...] | None,
        Field(strict=False, min_length=1, max_length=MAX_LOOKS),
    ] = Field(default=None, description="Growing numbers of blocks at which the ablation may answer and stop.")

    @field_validator("looks")
    @classmethod
    def _growing(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and list(value) != sorted(set(value)):
            raise refuse(f"looks must grow, got {list(value)}", f"use looks: {sorted(set(value))}")
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> "Blocks":
        if (self.count is None) == (self.looks is None):
            raise refuse("give exactly one of 'count' and 'looks'", f"use {{count: {MIN_BLOCKS}}}")
        return self

    @model_validator(mode="wrap")  # runs around the one above, which must not see `auto`
    @classmethod
    def _auto(cls, value: Any, read: ModelWrapValidatorHandler["Blocks"]) -> "Blocks":
        return cls.model_construct() if value == AUTO else read(value)

    @property
    def auto(self) -> bool:
        """Whether the measured noise sets the number (`experiments.analysis.sizing`)."""
        return self.count is None and self.looks is None

    @property
    def number(self) -> int:
        """Planned blocks; with looks, the most that run."""
        return self.schedule[-1]

    @property
    def schedule(self) -> tuple[int, ...]:
        """Numbers of blocks at which the ablation may answer: one for a count. Raises ValueError for `auto`."""
        if self.auto:
            raise ValueError("blocks: auto has no number until the noise sets it")
        return self.looks or (int(self.count or 0),)


class Design(SpecPart):
    """Seeds, number of blocks and the seed of the running order."""

    seeds: Annotated[
        tuple[Annotated[int, Field(ge=0, le=2**53 - 1)], ...],
        Field(strict=False, min_length=1, max_length=MAX_SEEDS, json_schema_extra={"uniqueItems": True}),
    ] = Field(default=(1,), description="Training seeds; blocks cycle through them.")
    blocks: Blocks = Field(
        description="Number of blocks; each holds every arm once. auto: as many as the measured noise requires.",
        json_schema_extra=_or_auto,
    )
    order_seed: int = Field(default=0, ge=0, le=2**53 - 1, description="Seed of the balanced random running order.")
    underpowered: bool = Field(
        default=False,
        exclude_if=lambda value: not value,
        description="Run although the measured noise hides the effect at which a variant is adopted.",
    )

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        twice = next((seed for seed in value if value.count(seed) > 1), None)
        if twice is not None:
            raise refuse(f"seed {twice} is listed more than once", "list each seed once; blocks cycle through them")
        return value


_DEVICES = sorted({number for entry in NODE_CLASSES.values() for number in entry.offers})


def _placement_schema(schema: dict[str, Any]) -> None:
    """Publish the numbers of devices that each node class allows."""
    schema["anyOf"] = [
        {"properties": {"node_class": {"const": entry.name}, "devices": {"enum": list(entry.offers)}}}
        for entry in NODE_CLASSES.values()
    ]


class Placement(SpecPart):
    """Where the trials run."""

    model_config = ConfigDict(json_schema_extra=_placement_schema)

    node_class: Annotated[
        str,
        Field(
            description="The kind of machine.",
            json_schema_extra={"enum": [entry.name for entry in NODE_CLASSES.values() if entry.lanes]},
        ),
    ]
    devices: Annotated[
        int,
        Field(
            description="Devices of one node: a command sees them all; of a recipe they share each training step "
            "(lane xla), and each takes an equal number of its rows.",
            json_schema_extra={"enum": list(_DEVICES)},
        ),
    ] = 1
    max_foreign_load: Percent = Field(
        default=25.0,
        description="Share of the cores' time that other processes may take during a trial that runs on the host, "
        "where times decide; above it the block runs again.",
        json_schema_extra={"default": "25%"},
    )

    @field_validator("node_class")
    @classmethod
    def _known(cls, value: str) -> str:
        return one_of(value, list(NODE_CLASSES), f"unknown node class {shown(value)}; known")

    @field_validator("devices")
    @classmethod
    def _available(cls, value: int, info: ValidationInfo) -> int:
        """Reject a number of devices that the node class does not offer; an unknown class has a problem of its own."""
        node_class = NODE_CLASSES.get(info.data.get("node_class", ""))
        allowed = _DEVICES if node_class is None else node_class.offers
        if value not in allowed:
            where = "" if node_class is None else f" on node class '{node_class}'"
            raise refuse(f"{value} devices for one trial are not available{where}; allowed: {listed(allowed)}")
        return value


class Limits(SpecPart):
    """Budgets of the ablation and its place in the queue."""

    trial: Seconds = Field(
        default=1200,
        description="Wall time after which a trial is stopped. Preparing the data of a block has a limit of its own, "
        "an hour.",
        json_schema_extra={"default": "20m"},
    )
    device_minutes: float = Field(
        default=180.0,
        gt=0,
        le=1_000_000,
        description="Budget of the whole ablation, broken attempts included; a step over four devices uses four per "
        "minute. When it is used up, waiting blocks are cancelled, and the verdict lacks their data.",
    )
    priority: int = Field(default=50, ge=0, le=100, description="Higher runs first.")

    @field_validator("device_minutes", mode="before")
    @classmethod
    def _in_minutes(cls, value: object) -> object:
        return number_in("minutes", value)


def _primary_name(name: str, declared: Iterable[str]) -> str:
    """Return the name of a metric that can decide; reject any other."""
    allowed = (*PRIMARY_METRICS, *declared)
    return one_of(name, allowed, f"metric {shown(name)} cannot be primary; allowed", METRIC_LABELS)


def _required_name(name: str, declared: Iterable[str]) -> str:
    """Return the name of a metric that can be bounded; reject any other."""
    allowed = (*REQUIRED_METRICS, *declared)
    return one_of(name, allowed, f"metric {shown(name)} cannot be required; allowed", METRIC_LABELS)


class Primary(SpecPart):
    """The deciding metric with its practical margin."""

    model_config = ConfigDict(json_schema_extra=_primary_schema)

    metric: Annotated[
        str,
        Field(
            description="The number that decides: one of ours, or one that workload.metrics declares.",
            json_schema_extra=_ours_or_declared(PRIMARY_METRICS),
        ),
    ] = "tokens_per_s"
    margin: Margin = Field(
        description="Differences within this margin count as the same. Metrics without noise may have 0%, where any "
        "change counts. Losses must have 0%, because they are compared bit for bit."
    )
    adopt_if: Percent | None = Field(
        default=None, description="Improvement at which a variant is adopted; losses have none."
    )

    @field_validator("metric")
    @classmethod
    def _known(cls, value: str) -> str:
        return value if is_declarable(value) else _primary_name(value, ())

    @field_validator("margin")
    @classmethod
    def _fits_the_metric(cls, value: float, info: Any) -> float:
        metric = info.data.get("metric")
        if metric and metric not in EXACT_METRICS and value == 0:
            raise refuse(f"the margin of '{metric}' must be above 0%: no test proves a difference of exactly zero")
        if metric in LOSS_METRICS and value != 0:
            raise refuse(f"'{metric}' is compared bit for bit; its margin is {NO_MARGIN}", f"use margin: {NO_MARGIN}")
        return value

    @field_validator("adopt_if")
    @classmethod
    def _beyond_margin(cls, value: float | None, info: Any) -> float | None:
        margin, metric = info.data.get("margin"), info.data.get("metric")
        if value is not None and metric in LOSS_METRICS:
            raise refuse(f"'{metric}' has no direction of improvement", "leave adopt_if out")
        if value is not None and margin is not None and value < margin:
            detail = f"adopt_if {show_percent(value)} is below the margin {show_percent(margin)}"
            raise refuse(detail, "adopt_if must be at least the margin")
        return value

    @property
    def exact(self) -> bool:
        """Whether the metric decides by its value, without statistics."""
        return self.metric in EXACT_METRICS

    @property
    def threshold_pct(self) -> float:
        """Improvement in percent at which a variant may be adopted."""
        return self.margin if self.adopt_if is None else self.adopt_if


class Requirement(SpecPart):
    """A condition on a variant besides the primary metric: exactly one of max_delta, max_value, rule and margin."""

    model_config = ConfigDict(json_schema_extra=_requirement_schema)

    metric: Annotated[
        str,
        Field(
            description="The number that is bounded: one of ours, or one that workload.metrics declares.",
            json_schema_extra=_ours_or_declared(REQUIRED_METRICS),
        ),
    ]
    max_delta: float | None = Field(
        default=None, ge=0, le=1e9, description="Allowed rise over the baseline, in its unit."
    )
    max_value: float | None = Field(default=None, gt=0, le=1e9, description="Absolute budget, in the metric's unit.")
    rule: Literal["identical", "envelope", "as_claimed"] | None = Field(
        default=None,
        description="For losses: bit-identical, within the spread of baseline repeats, or as the gates claim.",
    )
    tolerance: float = Field(default=1e-3, ge=0, le=100, description="Smallest envelope, in nats.")
    margin: Percent | None = Field(
        default=None,
        exclude_if=lambda value: value is None,
        description="For declared metrics: the variant must be proved to be no worse than the baseline by more.",
    )

    @field_validator("metric")
    @classmethod
    def _known(cls, value: str) -> str:
        return value if is_declarable(value) else _required_name(value, ())

    @field_validator("max_delta", "max_value", mode="before")
    @classmethod
    def _in_its_unit(cls, value: object, info: ValidationInfo) -> object:
        metric = METRICS.get(info.data.get("metric", ""))
        return value if metric is None or value is None else number_in(metric.unit, value)

    @model_validator(mode="after")
    def _exactly_one(self) -> "Requirement":
        bounds = [key for key in ("max_delta", "max_value", "rule", "margin") if getattr(self, key) is not None]
        if len(bounds) != 1:
            raise refuse(f"give exactly one of max_delta, max_value, rule and margin; given: {listed(bounds)}")
        if self.margin is not None and not is_declarable(self.metric):
            raise refuse(f"a margin is for metrics of workload.metrics; '{self.metric}' takes max_delta or max_value")
        if self.rule and self.metric not in LOSS_METRICS and not is_declarable(self.metric):
            raise refuse(f"rule '{self.rule}' is for losses; '{self.metric}' takes max_delta or max_value")
        return self


class SessionLevel(SpecPart):
    """A proposal of a session, and the level that the session's budget gives it (`experiments.design.proposals`)."""

    name: Name = Field(description="Name of the session.")
    proposal: int = Field(ge=1, le=2**53 - 1, description="Number of the proposal, from 1.")
    kept: Annotated[
        tuple[Annotated[int, Field(ge=1, le=2**53 - 1)], ...],
        Field(strict=False, max_length=MAX_KEPT, description="Kept proposals before it, from which the level follows."),
    ] = ()
    level: float = Field(gt=0, le=2 * SESSION_ALPHA, description="Two-sided level of the proposal's tests.")


def _rule_schema(schema: dict[str, Any]) -> None:
    without_null(schema, "session")


class VerdictRule(SpecPart):
    """The verdict rule, hashed before the first sample."""

    model_config = ConfigDict(json_schema_extra=_rule_schema)

    primary: Primary
    require: Annotated[
        tuple[Requirement, ...],
        Field(strict=False, max_length=MAX_REQUIREMENTS, description="Further conditions for adopting a variant."),
    ] = ()
    session: SessionLevel | None = Field(
        default=None,
        exclude_if=lambda value: value is None,
        description="Set by the service for a proposal of a session (`ablate try`); a submitted spec must not have it.",
    )

    def level_of(self, asking: int) -> float:
        """Return the two-sided level of the `asking`-th asking of a question; in a session that of the proposal."""
        return alpha_of(asking) if self.session is None else self.session.level


class AblationSpec(SpecPart):
    """A complete ablation: workload, baseline, variants, design, placement, limits and the verdict rule."""

    model_config = ConfigDict(json_schema_extra=_whole_schema)

    ablation: Name = Field(description="Name of the ablation.")
    purpose: Literal["answer", "calibration"] = Field(
        default="answer",
        exclude_if=lambda value: value == "answer",
        description="To answer a question, or to measure a node's noise, where every variant repeats the baseline.",
    )
    question: Text = Field(
        min_length=1,
        max_length=500,
        description="The question that the verdict answers, on one line.",
        json_schema_extra={"pattern": TEXT_PATTERN},
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
    labels: Labels = Field(default_factory=dict, description="Free key-value pairs to filter by.")

    @field_validator("variants")
    @classmethod
    def _not_baseline(cls, value: dict[str, VariantSpec]) -> dict[str, VariantSpec]:
        if BASELINE in value:
            raise_all([(BASELINE, refuse(f"a variant cannot be named '{BASELINE}'"), None)])
        return value

    @field_validator("verdict")
    @classmethod
    def _metrics_exist(cls, value: VerdictRule, info: ValidationInfo) -> VerdictRule:
        """Reject metrics that are neither ours nor declared; an illegal workload has a problem of its own."""
        workload: Workload | None = info.data.get("workload")
        if workload is None:
            return value
        errors: Problems = []
        try:
            _primary_name(value.primary.metric, workload.metrics)
        except PydanticCustomError as error:
            errors.append((("primary", "metric"), error, value.primary.metric))
        for index, one in enumerate(value.require):
            try:
                _required_name(one.metric, workload.metrics)
            except PydanticCustomError as error:
                errors.append((("require", index, "metric"), error, one.metric))
            else:
                if one.metric in workload.metrics and one.margin is None:
                    detail = f"'{one.metric}' is a declared metric, which differs from run to run; it takes a margin"
                    errors.append((("require", index), refuse(detail, "use margin: 0.5%"), one.metric))
        raise_all(errors)
        return value

    @cached_property
    def metric(self) -> Metric:
        """The deciding metric."""
        return self.metric_named(self.verdict.primary.metric)

    def metric_named(self, name: str) -> Metric:
        """Return one of our metrics, or a declared one. Raises KeyError for an unknown name."""
        return METRICS.get(name) or declared_metric(name, self.workload.metrics[name].better)

    @cached_property
    def digest(self) -> str:
        """Digest of the canonical JSON of the spec; equal for equal YAML, JSON and TOML."""
        return digest(self.model_dump(mode="json"))


def _add_packages(parts: dict[str, Any]) -> None:
    """Add recipes, gates and overrides of installed packages to the schemas of a spec's parts."""
    for recipe in installed().recipes.values():
        workload = parts["Workload"]["properties"]
        workload["recipe"]["enum"] = [*workload["recipe"]["enum"], recipe.name]
        for name, override in recipe.overrides.items():
            workload["overrides"]["properties"].setdefault(name, {"description": override.description})
        for part in ("ArmSpec", "VariantSpec"):
            gates = parts[part]["properties"]["gates"]["properties"]
            for name, gate in recipe.gates.items():
                own = gates.setdefault(name, {"description": gate.question, "enum": []})
                own["enum"] = [*own["enum"], *(value for value in gate.values if value not in own["enum"])]


def ablation_json_schema() -> dict[str, Any]:
    """Return the published JSON Schema (draft 2020-12) of a spec.

    Its enums omit gate values that no node class can run today.
    """
    schema = AblationSpec.model_json_schema()
    _add_packages(schema["$defs"])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
