"""The configuration of a trial that runs a user's command, and its arms. Torch-free.

Arms of a command are declared: their arguments, variables and code are recorded, and nothing proves that the program
obeyed them. They are stored like gates, so that pages and MLflow show them in the same place.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from experiments.design.config_fields import differing_fields
from experiments.design.metrics import METRICS, PROCESS_METRIC
from experiments.design.problems import listed, nearest, pointer, shown
from experiments.design.spec import AblationSpec
from experiments.design.workload import ARCHIVE, COMMAND, Commit, RepositoryCommit, SentCode, SpecPart, VariantSpec
from experiments.errors import SpecProblem
from experiments.outcomes import BASELINE
from kernels.backends import NODE_CLASSES, NodeClass
from model.config import StepsConfig
from model.errors import ConfigError

SECRET = "secret"  # noqa: S105 - the word before the name of one
PROFILED_DEVICES = ("cpu", "cuda")
"""Torch's names of devices whose kernels, or operators, its profiler reports."""
DECLARED = "declared, not attested"
"""How a receipt says that an arm's arguments, variables or code were requested and nothing proves them."""
SHORT_DIGEST_CHARS = 19
"""Characters of an archive's digest that everybody may see; the whole one is for those who may use the archive."""
CLOCK_SHARE = 0.001
CLOCK_S = 0.002
"""The worker's clock and the program's may differ by this share of the window plus these seconds."""


@dataclass(frozen=True, kw_only=True)
class PackageSettings:
    """The recipe of an installed package that a trial runs, with all that readers of its receipt need."""

    recipe: str
    version: int
    distribution: str
    """Name and version of the installed distribution, such as "own-recipe 0.1.0"."""
    digest: str
    """Digest of the package's Python files."""
    train: str
    """`module:function` of the training program."""
    values: Mapping[str, bool | int | float | str]
    """The recipe's configuration with overrides and gates."""
    claims: Mapping[str, str]
    """Claim of each gate about the numbers."""
    flops_per_step: int | None = None
    """Model FLOPs of a step, forward and backward; None if the recipe does not say."""
    tokens_per_step: int | None = None
    """Tokens of a step over all ranks; None if the recipe does not say."""


@dataclass(frozen=True, kw_only=True)
class ProgramConfig:
    """Complete configuration of one trial of a command: that of its arm, and the block's seed."""

    command: tuple[str, ...]
    """Program and arguments of all arms, with placeholders."""
    args: tuple[str, ...] = ()
    """Arguments of the arm, appended."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of the arm, the workload's included."""
    secrets: Annotated[tuple[str, ...], Field(exclude_if=lambda value: not value)] = ()
    """Names of variables that the node takes from its store of secrets."""
    code: str | Mapping[str, str] | None = None
    """A folder on the node, {git, commit}, {archive}, or None without files."""
    environment: str | None = None
    """A Python environment that the node's operator has named."""
    metrics: Mapping[str, str] = field(default_factory=dict)
    """Better direction of each declared metric."""
    lines: Annotated[Mapping[str, str], Field(exclude_if=lambda value: not value)] = field(default_factory=dict)
    """Of metrics that the program prints: the line with {} in place of the number."""
    profile: bool = False
    requires_kernel: Annotated[str | None, Field(exclude_if=lambda value: value is None)] = None
    """Pattern that the name of a kernel in the profiled step must have; None for any table."""
    needs: Literal["process", "steps", "tokens"] = "process"
    """The marks that the deciding metric needs: none, of steps, or of steps with tokens."""
    steps: StepsConfig = field(default_factory=StepsConfig)
    devices: int = 1
    seed: int = 0
    package: PackageSettings | None = None
    """The recipe of a package; None for a command."""


_CONFIG = TypeAdapter(ProgramConfig)


def needs_of(metric: str) -> Literal["process", "steps", "tokens"]:
    """Return the marks that a deciding metric needs; a declared one is reported without marks, too."""
    if metric == "tokens_per_s":
        return "tokens"
    return "process" if metric == PROCESS_METRIC or metric not in METRICS else "steps"


def marked_steps(*, warmup: int, timed: int) -> StepsConfig:
    """Return the steps of a command, which has no passes, slices and validation rows of ours."""
    return StepsConfig(warmup=warmup, warmup_s=0.0, timed=timed, slice=0, val_rows=0)


def is_program(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration as JSON belongs to a command, and not to a recipe."""
    return COMMAND in config


def read_program(config: Mapping[str, Any]) -> ProgramConfig:
    """Return the typed configuration of its JSON.

    The JSON may lack fields that were added later: their defaults are the earlier behaviour. Raises ConfigError when a
    value is illegal, or for a field that this code does not know.
    """
    try:
        typed = _CONFIG.validate_python(dict(config))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(".".join(str(part) for part in first["loc"]) or "config", first["msg"]) from error
    differing = sorted(differing_fields(_CONFIG.dump_python(typed, mode="json"), config, may_be_older=True))
    if differing:
        raise ConfigError(differing[0], "is unknown to this code, or changed its value when read")
    return typed


def program_json(config: ProgramConfig) -> dict[str, Any]:
    """Return the JSON of a configuration, which `read_program` reads."""
    values: dict[str, Any] = _CONFIG.dump_python(config, mode="json")
    if config.package is None:
        del values["package"]
    return values


def argv_of(config: ProgramConfig, *, out: str) -> list[str]:
    """Return the program and its arguments with placeholders filled in."""
    values = {"{seed}": str(config.seed), "{out}": out, "{steps}": str(config.steps.total)}
    filled = []
    for argument in (*config.command, *config.args):
        for name, value in values.items():
            argument = argument.replace(name, value)
        filled.append(argument)
    return filled


def needed_secret(name: str) -> str:
    """Return the word with which a block asks for a secret, and a node offers it (service/store/nodes/placement)."""
    return f"{SECRET}:{name}"


def lane_of(config: Mapping[str, Any]) -> str:
    """Return the lane that a node must offer for the commands of this configuration (service/store/nodes/placement)."""
    environment = config.get("environment")
    return COMMAND if environment is None else f"{COMMAND}:{environment}"


def shared_fields(spec: AblationSpec) -> dict[str, Any]:
    """Return the fields of a configuration that commands and recipes of packages take from a spec alike."""
    workload = spec.workload
    return {
        "metrics": {name: metric.better for name, metric in workload.metrics.items()},
        "lines": {name: metric.line for name, metric in workload.metrics.items() if metric.line is not None},
        "profile": workload.profile or bool(workload.require_kernels),
        "needs": needs_of(spec.verdict.primary.metric),
        "secrets": tuple(sorted(workload.secrets)),
        "steps": marked_steps(warmup=workload.steps.warmup, timed=workload.steps.timed),
        "devices": spec.placement.devices,
    }


def program_arms(spec: AblationSpec) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield name, declared settings and configuration without the seed of every arm, the baseline first."""
    workload, base = spec.workload, spec.baseline
    first = ProgramConfig(
        command=workload.command or (),
        args=base.args,
        env={**workload.env, **base.env},
        code=_plain(workload.code),
        environment=workload.environment,
        **shared_fields(spec),
    )
    configs = {BASELINE: first, **{name: _changed(spec, first, own) for name, own in spec.variants.items()}}
    patterns = workload.require_kernels
    configs = {name: replace(config, requires_kernel=patterns.get(name)) for name, config in configs.items()}
    variables = sorted({name for config in configs.values() for name in config.env})
    for name, config in configs.items():
        declared: dict[str, Any] = {"args": " ".join(config.args), "code": _shown_code(config.code)}
        declared |= {f"env.{variable}": config.env.get(variable, "") for variable in variables}
        values = program_json(config)
        del values["seed"]
        yield name, declared, values


def _changed(spec: AblationSpec, first: ProgramConfig, own: VariantSpec) -> ProgramConfig:
    changes: dict[str, Any] = {}
    if own.args is not None:
        changes["args"] = own.args
    if own.env is not None:
        changes["env"] = {**spec.workload.env, **own.env}
    if own.code is not None:
        repository = first.code if isinstance(own.code, Commit) and isinstance(first.code, Mapping) else {}
        code = _plain(own.code)
        changes["code"] = {**repository, **code} if isinstance(code, dict) else code
    return replace(first, **changes)


def _plain(code: str | SpecPart | None) -> str | dict[str, str] | None:
    return code.model_dump() if isinstance(code, SpecPart) else code


def _shown_code(code: str | Mapping[str, str] | None) -> str:
    if code is None or isinstance(code, str):
        return code or ""
    return code[ARCHIVE][:SHORT_DIGEST_CHARS] if ARCHIVE in code else f"{code['git']} {code['commit'][:12]}"


def code_of(spec: AblationSpec) -> Iterator[tuple[str, str | SpecPart]]:
    """Yield every code of a spec with its pointer."""
    if spec.workload.code is not None:
        yield pointer("workload", "code"), spec.workload.code
    for name, own in spec.variants.items():
        if own.code is not None:
            yield pointer("variants", name, "code"), own.code


def sent_code(spec: AblationSpec) -> dict[str, str]:
    """Return the digests of the archives that a spec names, by pointer."""
    return {where: code.archive for where, code in code_of(spec) if isinstance(code, SentCode)}


def program_problems(spec: AblationSpec) -> Iterator[SpecProblem]:
    """Find parts of a spec with a command that only fit a recipe, or do not fit each other."""
    node_class = NODE_CLASSES[spec.placement.node_class]
    if node_class.compiles_only or node_class.device_type == "xla":
        able = [name for name, entry in NODE_CLASSES.items() if entry.device_type in ("cpu", "cuda")]
        detail = f"commands do not run on node class '{node_class}'; allowed: {', '.join(able)}"
        yield SpecProblem(pointer=pointer("placement", "node_class"), detail=detail)
    yield from _placement_problems(spec, node_class)
    yield from _secret_problems(spec)
    if spec.baseline.gates:
        detail = "gates belong to recipes; this workload is a command"
        yield SpecProblem(pointer=pointer("baseline", "gates"), detail=detail, hint="use args or env")
    for where, code in code_of(spec):
        named = code.git if isinstance(code, RepositoryCommit) else code
        if isinstance(named, str) and not named.startswith("/"):
            detail = f"code {shown(named)} is a folder of the submitter, which nothing has packed and sent"
            yield SpecProblem(
                pointer=where, detail=detail, hint="submit the file with `ablate run`, or send an archive"
            )
    for name, own in spec.variants.items():
        if own.gates is not None:
            detail = "gates belong to recipes; this workload is a command"
            where = pointer("variants", name, "gates")
            yield SpecProblem(pointer=where, detail=detail, hint="use args, env or code")
        if own.overrides:
            where, detail = pointer("variants", name, "overrides"), "overrides belong to recipes; this is a command"
            yield SpecProblem(pointer=where, detail=detail, hint="use args or env")
        if isinstance(own.code, Commit) and not isinstance(spec.workload.code, RepositoryCommit):
            detail = "a commit alone needs workload.code with a repository"
            where, hint = pointer("variants", name, "code"), "write {git: folder, commit: ...}"
            yield SpecProblem(pointer=where, detail=detail, hint=hint)
    if spec.verdict.primary.metric == PROCESS_METRIC and hides_failures(spec.workload.command or ()):
        where, detail = pointer("workload", "command"), f"{HIDDEN_FAILURES}, and process_s decides"
        yield SpecProblem(pointer=where, detail=detail, hint="write [bash, -o, pipefail, -c, ...]")
    yield from kernel_problems(spec)


def _secret_problems(spec: AblationSpec) -> Iterator[SpecProblem]:
    """Find variables that an arm sets although they are secrets of the node."""
    places: dict[tuple[str, ...], Mapping[str, str]] = {
        ("workload",): spec.workload.env,
        ("baseline",): spec.baseline.env,
    }
    places |= {("variants", name): own.env or {} for name, own in spec.variants.items()}
    for place, variables in places.items():
        for name in set(variables).intersection(spec.workload.secrets):
            detail = f"variable {name} is one of workload.secrets, so every arm gets the node's value"
            yield SpecProblem(pointer=pointer(*place, "env", name), detail=detail, hint="leave it out here")


_SHELLS = frozenset({"sh", "bash", "dash", "ksh", "zsh"})
HIDDEN_FAILURES = "a shell ends as the last program of a pipe does, so a failure of an earlier one is not seen"


def hides_failures(command: Sequence[str]) -> bool:
    """Return whether a command has the text of a shell with a pipe, and no `pipefail`."""
    shells = [place for place, word in enumerate(command) if word.rpartition("/")[2] in _SHELLS]
    if not shells or any("pipefail" in word for word in command):
        return False
    words = iter(command[shells[0] + 1 :])
    if not any(word.startswith("-") and word.endswith("c") for word in words):
        return False
    lexer = shlex.shlex(next(words, ""), posix=True, punctuation_chars=True)
    with suppress(ValueError):  # quotes without end, of which the shell itself complains
        return any(token in {"|", "|&"} for token in lexer)
    return False


def _placement_problems(spec: AblationSpec, node_class: NodeClass) -> Iterator[SpecProblem]:
    most = node_class.command_devices
    if spec.placement.devices > most:
        allowed = "1" if most == 1 else f"1 to {most}"
        detail = f"{spec.placement.devices} devices for a command on node class '{node_class}'; allowed: {allowed}"
        yield SpecProblem(pointer=pointer("placement", "devices"), detail=detail)


def kernel_problems(spec: AblationSpec) -> Iterator[SpecProblem]:
    """Find required kernels of arms that are not there."""
    arms = (BASELINE, *spec.variants)
    for name in spec.workload.require_kernels:
        if name not in arms:
            detail = f"'{name}' is no arm of this ablation; arms: {listed(arms)}"
            where = pointer("workload", "require_kernels", name)
            yield SpecProblem(pointer=where, detail=detail, hint=nearest(name, arms))


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
