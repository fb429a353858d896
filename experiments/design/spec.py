"""AblationSpec, the model of a submitted spec: YAML and JSON load into it, and unknown keys are errors.

It checks single values. The plan checks values together: a gate that a node class lacks, a variant equal to the
baseline. A change of a Field's description also changes the published JSON Schema.
"""

import re
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    ModelWrapValidatorHandler,
    PlainSerializer,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ablate.experiments.design.metrics import (
    EXACT_METRICS,
    METRICS,
    PRIMARY_METRICS,
    REQUIRED_METRICS,
    declared_metric,
)
from ablate.experiments.design.packages import installed
from ablate.experiments.design.power import MAX_BLOCKS, Look
from ablate.experiments.design.problems import listed, shown
from ablate.experiments.design.spec_values import (
    NAME_PATTERN,
    TEXT_PATTERN,
    Labels,
    Name,
    Percent,
    Problems,
    Seconds,
    SpecPart,
    Text,
    number_in,
    one_of,
    raise_all,
    refuse,
    without_null,
)
from ablate.experiments.design.verdict_rule import VerdictRule, primary_name, required_name
from ablate.experiments.design.workload import ArmSpec, VariantSpec, Workload
from ablate.experiments.digest import digest
from ablate.experiments.node_classes import GPU_PATTERN, NODE_CLASSES, is_gpu
from ablate.experiments.node_classes import MOST_LETTERS as MOST_LETTERS_OF_CLASS
from ablate.experiments.outcomes import BASELINE
from ablate.model.measurements import GIB, Metric

MIN_BLOCKS = 6
"""With fewer blocks, an exact two-sided sign-flip test cannot reject at 5 %."""
AUTO = "auto"
"""Value of `design.blocks` that leaves the number of blocks to the measured noise."""
MAX_LOOKS = 16
MIN_EXACT_BLOCKS = 2
"""Fewest blocks where an exact metric decides: one repeat shows that it is exact."""
MIN_SEEDS = 6
"""Fewest seeds where a loss decides, as `MIN_BLOCKS`."""
MIN_PROVING_SEEDS = 4
"""Fewest seeds that can prove that a loss is no worse."""
MAX_VARIANTS = 64
MAX_SEEDS = 64


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


def _or_a_number(schema: dict[str, Any]) -> None:
    several = {name: schema.pop(name) for name in ("type", "items", "minItems", "maxItems")}
    schema["anyOf"] = [several | {"uniqueItems": True}, {"type": "integer", "minimum": 1, "maximum": MAX_SEEDS}]


def _distinct(value: tuple[int, ...]) -> tuple[int, ...]:
    twice = next((seed for seed in value if value.count(seed) > 1), None)
    if twice is not None:
        raise refuse(f"seed {twice} is listed more than once", "list each seed once; blocks cycle through them")
    return value


def _number_or(value: object, read: ValidatorFunctionWrapHandler) -> object:
    """Return a number of seeds as it is, and read a list."""
    if isinstance(value, bool) or not isinstance(value, int):
        return read(value)
    if not 1 <= value <= MAX_SEEDS:
        raise refuse(f"{value} seeds; allowed: 1 to {MAX_SEEDS}, or a list of seeds")
    return value


_Listed = Annotated[
    tuple[Annotated[int, Field(ge=0, le=2**53 - 1)], ...],
    Field(strict=False, min_length=1, max_length=MAX_SEEDS),
    AfterValidator(_distinct),
    WrapValidator(_number_or),
    PlainSerializer(lambda value: value),
]
Seeds = Annotated[tuple[int, ...] | int, GetPydanticSchema(lambda _source, handler: handler(_Listed))]
"""A list of seeds, or their number. The problems of a union would name its parts, which no user wrote."""


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
        """Whether the measured noise sets the number (`ablate.experiments.analysis.sizing`)."""
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

    @property
    def last_look(self) -> Look:
        """The look at all blocks."""
        return Look(self.schedule, len(self.schedule) - 1)

    def look_at(self, counted: int) -> Look:
        """Return the last look that so many blocks reach; before the first look the first one."""
        reached = sum(look <= counted for look in self.schedule)
        return Look(self.schedule, max(reached - 1, 0))


class Design(SpecPart):
    """Seeds, number of blocks and the seed of the running order."""

    seeds: Seeds = Field(
        default=1,
        description="Number of training seeds, which are drawn after the spec is fixed, or a list of chosen ones; "
        "blocks cycle through them.",
        json_schema_extra=_or_a_number,
    )
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

    @property
    def num_seeds(self) -> int:
        """Number of seeds, listed or to be drawn."""
        return self.seeds if isinstance(self.seeds, int) else len(self.seeds)

    @property
    def chosen_seeds(self) -> tuple[int, ...] | None:
        """The seeds that the spec lists; None if they are drawn."""
        return None if isinstance(self.seeds, int) else self.seeds


_DEVICES = sorted({number for entry in NODE_CLASSES.values() for number in entry.offers})
MOST_NODES = 64
ANY_GPU = "any"
_GPU_NAMES = "^[A-Za-z0-9*?][A-Za-z0-9*? -]{0,62}$"
SIZE_PATTERN = r"^[0-9]{1,6}([.][0-9]{1,3})? ?GiB$"


def _placement_schema(schema: dict[str, Any]) -> None:
    """Publish the numbers of devices that each node class allows, and that a spec names a class or a GPU."""
    without_null(schema, "gpu", "memory")
    schema["anyOf"] = [
        {"properties": {"node_class": {"const": entry.name}, "devices": {"enum": list(entry.offers)}}}
        for entry in NODE_CLASSES.values()
    ]
    schema["anyOf"].append({"properties": {"node_class": {"pattern": GPU_PATTERN}}})
    schema["not"] = {"anyOf": [{"required": ["node_class", name]} for name in ("gpu", "memory")]}


def _bytes(value: object) -> object:
    """Return the bytes of a size such as 40GiB; a number of bytes comes from the form of a resolved spec."""
    if isinstance(value, str) and re.search(SIZE_PATTERN, value):
        return round(float(value.removesuffix("GiB")) * GIB)
    raise refuse(f"{shown(value)} is not a size; allowed: a number with its unit, such as 40GiB")


class Placement(SpecPart):
    """Where the trials run: a node class, or a GPU whose class is chosen when the spec is submitted."""

    model_config = ConfigDict(json_schema_extra=_placement_schema)

    node_class: Annotated[
        str,
        Field(
            description="The kind of machine. Without it, and without gpu: the only kind that the service has.",
            exclude_if=lambda value: not value,
            json_schema_extra={
                "anyOf": [
                    {"enum": [entry.name for entry in NODE_CLASSES.values() if entry.lanes]},
                    {"type": "string", "pattern": GPU_PATTERN, "maxLength": MOST_LETTERS_OF_CLASS},
                ]
            },
        ),
    ] = ""
    gpu: Annotated[str, Field(pattern=_GPU_NAMES)] | None = Field(
        default=None,
        exclude_if=lambda value: value is None,
        description=f"Instead of node_class: `{ANY_GPU}`, or a name with `*` and `?`, such as `A100*`. All blocks run "
        "on one class: of those that fit, the one with most nodes that take work.",
    )
    memory: (
        Annotated[
            int,
            BeforeValidator(_bytes),
            PlainSerializer(lambda value: f"{value / GIB:g}GiB"),
            WithJsonSchema({"type": "string", "pattern": SIZE_PATTERN, "examples": ["40GiB"]}),
        ]
        | None
    ) = Field(
        default=None,
        exclude_if=lambda value: value is None,
        description="With gpu: least memory of a device, of that which its driver reports.",
    )
    devices: Annotated[
        int,
        Field(
            description="Devices of each node: a command sees them all; of a recipe they share each training step, by "
            "rows, and by layers or tokens as the gates say. On class `cpu` they are processes that share the cores.",
            json_schema_extra={"enum": list(_DEVICES)},
        ),
    ] = 1
    nodes: Annotated[int, Field(ge=1, le=MOST_NODES)] = Field(
        default=1,
        exclude_if=lambda value: value == 1,
        description="Nodes of an allocation of Slurm over which a program of your own, or of a package's recipe, runs; "
        "each has `devices`.",
    )
    max_foreign_load: Percent = Field(
        default=25.0,
        description="Share of the cores' time that other processes may take during a trial that runs on the host, "
        "where times decide; above it the block runs again once, and then counts.",
        json_schema_extra={"default": "25%"},
    )

    @field_validator("node_class")
    @classmethod
    def _known(cls, value: str) -> str:
        if is_gpu(value):
            return value
        known = f"unknown node class {shown(value)}; known, besides GPUs by their names, such as a100-80gb"
        return one_of(value, list(NODE_CLASSES), known)

    @field_validator("gpu", "memory")
    @classmethod
    def _instead_of_a_class(cls, value: object, info: ValidationInfo) -> object:
        if value is not None and info.data.get("node_class"):
            raise refuse("a placement has either a node_class, or a gpu with or without memory", "leave one out")
        if value is not None and info.field_name == "memory" and info.data.get("gpu") is None:
            raise refuse("memory says which GPUs fit, and there is no gpu", f"add gpu: {ANY_GPU}")
        return value

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
    placement: Placement = Field(default_factory=Placement)
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
            primary_name(value.primary.metric, workload.metrics)
        except PydanticCustomError as error:
            errors.append((("primary", "metric"), error, value.primary.metric))
        for index, one in enumerate(value.require):
            try:
                required_name(one.metric, workload.metrics)
            except PydanticCustomError as error:
                errors.append((("require", index, "metric"), error, one.metric))
            else:
                if one.metric in workload.metrics and one.not_worse_by is None:
                    detail = f"'{one.metric}' is a declared metric, which differs from run to run; a test decides"
                    errors.append((("require", index), refuse(detail, "use not_worse_by: 0.5%"), one.metric))
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
        """Digest of the canonical JSON of the spec; equal for equal YAML and JSON."""
        return digest(self.model_dump(mode="json"))


def _add_packages(parts: dict[str, Any]) -> None:
    """Add recipes, gates and overrides of installed packages to the schemas of a spec's parts."""
    for recipe in installed().recipes.values():
        workload = parts["Workload"]["properties"]
        workload["recipe"]["enum"] = [*workload["recipe"]["enum"], recipe.name]
        for name, override in recipe.overrides.items():
            for part in ("Workload", "VariantSpec"):
                values = parts[part]["properties"]["overrides"]["properties"]
                values.setdefault(name, {"description": override.description})
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
