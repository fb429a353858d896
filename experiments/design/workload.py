"""The work that all arms of a spec share, and the changes of each arm.

A workload is a recipe of the built-in model, whose arms differ by gates, or a command that trains any other model,
whose arms differ by arguments, environment variables or code.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ablate.experiments.credentials import credential, credentials_in, form_of
from ablate.experiments.design.metrics import METRIC_NAME, METRICS, NOT_OURS, LoggedMetric, Tracker
from ablate.experiments.design.problems import listed, shown
from ablate.experiments.design.program_files import Code, Data, Environment, VariantCode, VariantEnvironment
from ablate.experiments.design.recipes import RECIPES, UNPUBLISHED
from ablate.experiments.design.spec_values import (
    BaselineGates,
    Overrides,
    Problems,
    RequiredKernels,
    RequiredLive,
    SpecPart,
    Text,
    VariantGates,
    is_none,
    of_a_package,
    one_of,
    raise_all,
    refuse,
    without_null,
)

COMMAND = "command"
"""Name of a workload that is a command, in the place of a recipe's."""
PLACEHOLDERS = ("seed", "out", "steps")
"""Words in braces that are filled in: the block's seed, a folder for the trial's files, the number of steps."""
MAX_ARGUMENTS = 200
MAX_VARIABLES = 64
MAX_SECRETS = 16
MAX_METRICS = 32
MAX_TIMED = 10_000
"""Most timed steps of an arm."""

_PLACEHOLDER = re.compile(r"\{([a-z_]*)\}")
_VARIABLE = "^[A-Za-z_][A-Za-z0-9_]{0,127}$"
_LINE = r"^[^\u0000-\u001f{}]*\{\}[^\u0000-\u001f{}]*$"
SECRET_NAME = re.compile(_VARIABLE[1:-1])
_OURS = re.compile("ABLATE_.*|CUDA_VISIBLE_DEVICES|LD_PRELOAD|LD_LIBRARY_PATH")
"""Variables that a spec may not set: they would change the worker's marks, its device locks or its program."""
WORKER_VARIABLES = re.compile(f"{_OURS.pattern}|PATH|PYTHON[A-Z]*|HOME|TMPDIR|VIRTUAL_ENV")
"""Variables that the worker sets, and that no secret can replace."""


def _is_empty(value: object) -> bool:
    return not value


def _check_argument(value: str) -> str:
    if "\0" in value:
        raise refuse("an argument cannot contain a NUL character", "remove it")
    unknown = next((name for name in _PLACEHOLDER.findall(value) if name not in PLACEHOLDERS), None)
    if unknown is not None:
        detail = f"unknown placeholder {{{unknown}}}; known: {listed(f'{{{name}}}' for name in PLACEHOLDERS)}"
        raise refuse(detail, "write other braces without a lower-case word inside")
    return value


def _credential_error(what: str, words: str) -> PydanticCustomError:
    """Return the error for a credential, whose value is never shown."""
    detail = f"{what} looks like {words}, which everybody who reads the answer would see"
    return refuse(detail, "store it on the node, and name its variable: workload.secrets: [NAME] (docs/own-code.md)")


def _check_no_credentials(arguments: tuple[str, ...]) -> tuple[str, ...]:
    raise_all([((i,), _credential_error(f"argument {i + 1}", words), "") for i, words in credentials_in(arguments)])
    return arguments


def _check_variables(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    bad = [name for name in value if not isinstance(name, str) or not re.fullmatch(_VARIABLE[1:-1], name)]
    rule = "allowed: letters, digits and '_', not beginning with a digit"
    errors = [(str(name), refuse(f"variable {shown(name)} is not allowed; {rule}"), value[name]) for name in bad]
    ours = [name for name in value if name not in bad and _OURS.fullmatch(name)]
    errors += [
        (name, refuse(f"variable {name} belongs to the worker; a spec cannot set it"), value[name]) for name in ours
    ]
    for name in [name for name in value if isinstance(name, str) and isinstance(value[name], str)]:
        if words := credential(name, value[name]):
            errors.append((name, _credential_error(f"the value of {name}", words), ""))
    raise_all(errors)
    return value


def _check_secrets(names: tuple[str, ...]) -> tuple[str, ...]:
    errors: Problems = []
    for number, name in enumerate(names, start=1):
        where = (number - 1,)
        if not SECRET_NAME.fullmatch(name) or form_of(name):
            rule = "allowed: the name of a variable, such as HF_TOKEN, without its value"
            errors.append((where, refuse(f"secret {number} is no name; {rule}"), ""))
        elif WORKER_VARIABLES.fullmatch(name):
            errors.append((where, refuse(f"variable {name} belongs to the worker; it cannot be a secret"), ""))
        elif name in names[: number - 1]:
            errors.append((where, refuse(f"secret {name} is named twice", "name it once"), ""))
    raise_all(errors)
    return names


_Argument: TypeAlias = Annotated[str, Field(max_length=4000), AfterValidator(_check_argument)]
Arguments: TypeAlias = Annotated[
    tuple[_Argument, ...], Field(strict=False, max_length=MAX_ARGUMENTS), AfterValidator(_check_no_credentials)
]
Command: TypeAlias = Annotated[
    tuple[_Argument, ...],
    Field(strict=False, min_length=1, max_length=MAX_ARGUMENTS),
    AfterValidator(_check_no_credentials),
]
Secrets: TypeAlias = Annotated[
    tuple[str, ...],
    Field(
        strict=False,
        max_length=MAX_SECRETS,
        json_schema_extra={"items": {"type": "string", "pattern": _VARIABLE}, "uniqueItems": True},
    ),
    AfterValidator(_check_secrets),
]
Variables: TypeAlias = Annotated[
    dict[str, Annotated[Text, Field(max_length=4000)]],
    Field(max_length=MAX_VARIABLES, json_schema_extra={"propertyNames": {"pattern": _VARIABLE}}),
    BeforeValidator(_check_variables),
]


class Steps(SpecPart):
    """Optimiser steps of one trial: step 0 (compilation), warm-up, then the timed window."""

    warmup: int = Field(default=3, ge=0, le=10_000, description="Steps after step 0 that are recorded, not timed.")
    warmup_s: float = Field(
        default=0.5,
        ge=0,
        le=3600,
        description="Seconds of load before the warm-up steps: passes without an update, so that steps stay the same.",
    )
    timed: int = Field(default=10, ge=1, le=MAX_TIMED, description="Steps of the measured window.")
    equal: Literal["steps", "tokens", "flops", "parameters"] = Field(
        default="steps",
        exclude_if=lambda value: value == "steps",
        description="Equal in all arms: steps, or tokens or model FLOPs of training. Then the timed steps are those of "
        "the baseline, and a variant with another batch or size has its own number. Parameters: within 2 %, so that a "
        "speed may compare models whose tokens take different FLOPs.",
    )
    slice: int = Field(
        default=0,
        ge=0,
        le=5_000,
        exclude_if=_is_empty,
        description="Timed steps that a trial runs before the other trials of its block run as many; an even number of "
        "slices makes the window. For machines whose speed drifts within a window. 0: no slices.",
    )
    val_rows: int = Field(
        default=8, ge=0, le=65_536, description="Validation rows evaluated after the last step, and by `val_every`."
    )
    val_every: int = Field(
        default=0,
        ge=0,
        le=10_000,
        exclude_if=_is_empty,
        description="Timed steps from one validation to the next, for curves of the validation loss. The last step is "
        "always followed by one; their time is in no step. 0: only after the last step.",
    )


def _metric_schema(schema: dict[str, Any]) -> None:
    without_null(schema, "line", "from", "tag", "run")
    schema["dependentRequired"] = {"tag": ["from"], "run": ["from"]}
    schema["not"] = {"required": ["line", "from"]}


class DeclaredMetric(SpecPart):
    """A number that a program reports, prints or logs."""

    model_config = ConfigDict(json_schema_extra=_metric_schema, serialize_by_alias=True)

    better: Literal["higher", "lower"] = Field(description="Direction of improvement.")
    line: Annotated[Text, Field(max_length=200, pattern=_LINE)] | None = Field(
        default=None,
        exclude_if=is_none,
        description="Part of a line that the program prints, with {} in place of the number; the last one counts. For "
        "programs that cannot be changed.",
    )
    tracker: Tracker | None = Field(
        default=None,
        alias="from",
        exclude_if=is_none,
        description="Where the program logs the number already: event files of TensorBoard, offline runs of W&B, or a "
        "local store of MLflow, in the folder of the trial. The last one logged counts.",
    )
    tag: Annotated[Text, Field(min_length=1, max_length=250)] | None = Field(
        default=None, exclude_if=is_none, description="Name under which it is logged; default: the metric's own."
    )
    run: Annotated[Text, Field(min_length=1, max_length=250)] | None = Field(
        default=None,
        exclude_if=is_none,
        description="Of several runs that log it, the one that counts: its name, or of TensorBoard the end of its "
        "folder, such as validation.",
    )

    @field_validator("line", mode="before")
    @classmethod
    def _one_place(cls, value: object) -> object:
        if isinstance(value, str) and (value.count("{}") != 1 or value.strip() == "{}"):
            detail = f"line is {shown(value)}; allowed: text of the line with {{}} once, in place of the number"
            raise refuse(detail, "such as 'val loss: {}'")
        return value

    @model_validator(mode="after")
    def _one_place_only(self) -> "DeclaredMetric":
        if self.line is not None and self.tracker is not None:
            raise refuse("'line' and 'from' are two places of one number; give one of them")
        extra = next((name for name in ("tag", "run") if getattr(self, name) is not None), None)
        if extra is not None and self.tracker is None:
            raise refuse(f"'{extra}' belongs to a metric that is logged", f"write from: tensorboard, {extra}: ...")
        return self

    def logged(self, name: str) -> LoggedMetric | None:
        """Return where metric `name` is logged; None if the program reports or prints it."""
        return None if self.tracker is None else LoggedMetric(tracker=self.tracker, tag=self.tag or name, run=self.run)


def _evaluation_schema(schema: dict[str, Any]) -> None:
    without_null(schema, "code")


class EvaluationSpec(SpecPart):
    """A command that measures the declared metrics after the program, from files that no arm changes."""

    model_config = ConfigDict(json_schema_extra=_evaluation_schema)

    command: Command = Field(
        description="Program and arguments, without a shell. {seed} and {steps} are filled in; {out} is the program's "
        "folder for files."
    )
    code: Code | None = Field(
        default=None,
        exclude_if=is_none,
        description="Its files, as workload.code, which is the default. A session keeps the code that opened it.",
    )

    @model_validator(mode="before")
    @classmethod
    def _command_alone(cls, value: object) -> object:
        if isinstance(value, list | tuple):
            return {COMMAND: value}
        if not isinstance(value, Mapping | SpecPart):
            raise refuse(f"evaluate is {shown(value)}; allowed: a list, such as [python, judge.py]")
        return value


_OF_A_COMMAND = ("code", "data", "environment", "env", "evaluate", "turns")
"""Keys that only a workload with a command has."""
BY_ARM = ("require_kernels", "require_live")
"""Keys of a workload that say by arm what has to run."""
_OF_PROGRAMS = ("metrics", *BY_ARM, "secrets")
"""Keys of commands and of recipes of packages."""


def _workload_schema(schema: dict[str, Any]) -> None:
    """Publish that a workload is a recipe or a command, and the keys of each."""
    without_null(schema, "recipe", "command", "code", "environment", "evaluate")
    command, evaluate = (schema["properties"][name] for name in (COMMAND, "evaluate"))
    alone = {name: value for name, value in command.items() if name not in ("title", "description")}
    evaluate["anyOf"] = [alone, {"$ref": evaluate.pop("$ref")}]
    forbidden = {"anyOf": [{"required": [name]} for name in (COMMAND, *_OF_A_COMMAND)]}
    programs = {"anyOf": [{"required": [name]} for name in _OF_PROGRAMS]}
    of_a_package = {"properties": {"recipe": {"not": {"enum": [*RECIPES]}}}}
    own_steps = {"properties": {"val_every": {"const": 0}}}
    schema["oneOf"] = [
        {"required": ["recipe"], "not": forbidden, "anyOf": [of_a_package, {"not": programs}]},
        {"required": [COMMAND], "not": {"required": ["recipe"]}, "properties": {
            "overrides": {"maxProperties": 0}, "steps": own_steps}},
    ]  # fmt: skip


class Workload(SpecPart):
    """The work and steps that all arms share: a recipe of the built-in model, or a command that trains another one."""

    model_config = ConfigDict(json_schema_extra=_workload_schema)

    recipe: Annotated[str, Field(json_schema_extra={"enum": [*RECIPES]})] | None = Field(
        default=None,
        exclude_if=is_none,
        description="A named configuration: built in, or of an installed package.",
    )
    overrides: Overrides = Field(default_factory=dict, description="Values changed in the recipe, for every arm.")
    steps: Steps = Field(default_factory=Steps)
    command: Command | None = Field(
        default=None,
        exclude_if=is_none,
        description="Program and arguments, without a shell; {seed}, {out} and {steps} are filled in.",
    )
    code: Code | None = Field(
        default=None,
        exclude_if=is_none,
        description="The program's files: a folder that commands pack and send (relative to the spec), an absolute "
        "folder on the node, or a commit of a repository in either place. Each trial runs in a copy.",
    )
    data: Data = Field(
        default=(),
        exclude_if=_is_empty,
        description="Files and folders of the node that trials may read and not change: beside the spec, where the "
        "program finds them beside its code, too, or absolute. Their content is not recorded.",
    )
    environment: Environment | None = Field(
        default=None,
        exclude_if=is_none,
        description="A Python environment: one that the node's operator has named, or packages that each node "
        "installs. Default: the worker's own.",
    )
    env: Variables = Field(default_factory=dict, exclude_if=_is_empty, description="Variables of every arm.")
    secrets: Secrets = Field(
        default=(),
        exclude_if=_is_empty,
        description="Names of variables with keys or passwords, which each node takes from its own store "
        "(`ABLATE_SECRETS`). Their values are stored nowhere, and are masked in logs.",
    )
    metrics: Annotated[
        dict[str, DeclaredMetric],
        Field(max_length=MAX_METRICS, json_schema_extra={"propertyNames": NOT_OURS}),
    ] = Field(
        default_factory=dict, exclude_if=_is_empty, description="Numbers that the program reports, prints or logs."
    )
    evaluate: EvaluationSpec | None = Field(
        default=None,
        exclude_if=is_none,
        description="A command that measures the declared metrics after the program, in a process and a copy of the "
        "workload's code that no arm changes. What the program says of these metrics does not count.",
    )
    turns: bool = Field(
        default=False,
        exclude_if=_is_empty,
        description="Let the trials of a block run by turns of half a second, for a program without marked steps that "
        "cpu_s decides, on cores that others use, too.",
    )
    profile: bool = Field(
        default=False,
        exclude_if=_is_empty,
        description="Run one more step after the window under torch's profiler, and store its table of kernels.",
    )
    require_kernels: RequiredKernels = Field(
        default_factory=dict,
        exclude_if=_is_empty,
        description="By arm, a regular expression, or several with the number of calls. A trial is refused unless each "
        "is found in a kernel's name in the profiled step, or its kernels have that many calls there.",
    )
    require_live: RequiredLive = Field(
        default_factory=dict,
        exclude_if=_is_empty,
        description="By arm, names that the program passes to `ablate.live(name)` (true) or must not pass (false). "
        "A trial in which it is otherwise is refused.",
    )

    @field_validator("recipe")
    @classmethod
    def _known(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and value.lower() in UNPUBLISHED:
            raise refuse(UNPUBLISHED[value.lower()], f"recipes: {listed(RECIPES)}")
        if value is None or of_a_package(info):
            return value
        return one_of(value, RECIPES, f"unknown recipe {shown(value)}; known")

    @field_validator("metrics")
    @classmethod
    def _named(cls, value: dict[str, DeclaredMetric]) -> dict[str, DeclaredMetric]:
        rule = "allowed: 1 to 63 of a-z, 0-9 and '_', beginning with a letter"
        bad = [name for name in value if not METRIC_NAME.fullmatch(name)]
        errors = [(name, refuse(f"metric name {shown(name)} is not allowed; {rule}"), name) for name in bad]
        for name in METRICS.keys() & value.keys():
            detail = f"'{name}' is the name of a metric of Ablate; allowed: any other name"
            errors.append((name, refuse(detail, f"use reported_{name}"), name))
        raise_all(errors)
        return value

    @model_validator(mode="after")
    def _one_kind(self) -> "Workload":
        if (self.recipe is None) == (self.command is None):
            raise refuse("give exactly one of 'recipe' and 'command'", f"recipes: {listed(RECIPES)}")
        if self.command is None:
            foreign = (*_OF_A_COMMAND, *(_OF_PROGRAMS if self.built_in else ()))
            extra = next((name for name in foreign if name in self.model_fields_set), None)
            if extra is not None:
                raise refuse(f"'{extra}' belongs to a command; this workload is recipe '{self.recipe}'")
        elif self.overrides:
            raise refuse("'overrides' change a recipe; this workload is a command", "use arguments of the command")
        elif self.steps.val_every:
            raise refuse("a command validates by itself, so steps.val_every has no effect", "leave it out")
        return self

    @property
    def name(self) -> str:
        """Name of the recipe, or `command`."""
        return self.recipe or COMMAND

    @property
    def built_in(self) -> bool:
        """Whether it trains the built-in model; else a command, or the recipe of a package."""
        return self.recipe in RECIPES


class ArmSpec(SpecPart):
    """The baseline: gates of a recipe, or additions to a command."""

    gates: BaselineGates = Field(
        default_factory=dict, title="Baseline gates", description="Gates by name; others keep the recipe's value."
    )
    args: Arguments = Field(default=(), exclude_if=_is_empty, description="Arguments appended to the command.")
    env: Variables = Field(default_factory=dict, exclude_if=_is_empty, description="Variables besides the workload's.")


_OF_A_VARIANT = ("args", "env", "code", "environment", "resume_at")
"""Keys of a variant that belong to commands."""


def _variant_schema(schema: dict[str, Any]) -> None:
    """Publish that a variant differs by gates or values, or in a key of commands."""
    without_null(schema, "gates", *_OF_A_VARIANT)
    changes = [{"required": [name]} for name in _OF_A_VARIANT]
    of_a_recipe = [
        {"required": ["gates"]},
        {"required": ["overrides"], "properties": {"overrides": {"minProperties": 1}}},
    ]
    schema["oneOf"] = [{"anyOf": of_a_recipe, "not": {"anyOf": changes}}, {"anyOf": changes}]


class VariantSpec(SpecPart):
    """One variant: gates and values in which it differs, or its arguments, variables, code or packages."""

    model_config = ConfigDict(json_schema_extra=_variant_schema)

    gates: VariantGates | None = Field(
        default=None,
        exclude_if=is_none,
        title="Variant gates",
        description="Gates by name; others keep the baseline's value.",
    )
    overrides: Overrides = Field(
        default_factory=dict,
        exclude_if=_is_empty,
        description="Values that differ from the workload's: another model, optimiser, batch or data.",
    )
    args: Arguments | None = Field(
        default=None,
        exclude_if=is_none,
        description="Arguments appended to the command, instead of the baseline's.",
    )
    env: Variables | None = Field(
        default=None, exclude_if=is_none, description="Variables besides the workload's, instead of the baseline's."
    )
    code: VariantCode | None = Field(
        default=None, exclude_if=is_none, description="Another folder, or another commit of the same repository."
    )
    environment: VariantEnvironment | None = Field(
        default=None, exclude_if=is_none, description="Other packages than the workload's."
    )
    resume_at: Annotated[int, Field(ge=1, le=2 * MAX_TIMED)] | None = Field(
        default=None,
        exclude_if=is_none,
        description="Steps after which the program is killed, and started again to go on from its checkpoint.",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> "VariantSpec":
        own = [name for name in _OF_A_VARIANT if getattr(self, name) is not None]
        ours = [name for name in ("gates", "overrides") if getattr(self, name)]
        if not ours and not own:
            detail = (
                f"a variant changes 'gates' or 'overrides' of a recipe, or one of {listed(_OF_A_VARIANT)} of a command"
            )
            raise refuse(f"{detail}; it has none")
        if ours and own:
            raise refuse(f"'{ours[0]}' belong to recipes and '{own[0]}' to commands; give one of them")
        return self
