"""Configuration of a program that a trial starts: a user's command, or the recipe of a package. Torch-free."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ablate.experiments.design.kinds.kind import ArmConfig, slice_problems, together_problems
from ablate.experiments.design.metrics import (
    CPU_STEP,
    METRICS,
    PROCESS_METRICS,
    TRACKER_VARIABLES,
    WINDOW_METRICS,
    LoggedMetric,
)
from ablate.experiments.design.problems import listed, nearest, pointer
from ablate.experiments.design.program_files import ARCHIVE
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.design.workload import BY_ARM, Workload
from ablate.experiments.digest import canonical_json
from ablate.experiments.errors import SpecProblem
from ablate.experiments.outcomes import BASELINE
from ablate.model.config import StepsConfig

SECRET = "secret"  # noqa: S105 - the word before the name of one
CLOCK_SHARE = 0.001
CLOCK_S = 0.002
"""The worker's clock and the program's may differ by this share of the window plus these seconds."""

LEAST_MARKED = 4
"""Fewest steps of a trial whose window decides: the first one, one to warm up, and one for each of two turns."""


_TITLE_LETTERS = 100


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A command that measures the declared metrics after the program: the same for all arms."""

    command: tuple[str, ...]
    code: str | Mapping[str, str]
    """As the code of a program."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of the workload, without those of an arm."""

    @property
    def title(self) -> str:
        """Its name for people."""
        return f"the protected evaluation `{' '.join(self.command)[:_TITLE_LETTERS]}`"


@dataclass(frozen=True, kw_only=True)
class ProgramArm(ArmConfig):
    """A program with its arguments, variables and code."""

    own_process = True

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
    data: Annotated[tuple[str | Mapping[str, str], ...], Field(exclude_if=lambda value: not value)] = ()
    """Files and folders of the node that it reads: absolute paths, or {path, at} for one beside its code."""
    environment: str | None = None
    """A Python environment that the node's operator has named."""
    lock: Annotated[str | None, Field(exclude_if=lambda value: value is None)] = None
    """The file of the code with the packages of an environment that the node builds."""
    metrics: Mapping[str, Literal["higher", "lower"]] = field(default_factory=dict)
    """Better direction of each declared metric."""
    lines: Annotated[Mapping[str, str], Field(exclude_if=lambda value: not value)] = field(default_factory=dict)
    """Of metrics that the program prints: the line with {} in place of the number."""
    logged: Annotated[Mapping[str, LoggedMetric], Field(exclude_if=lambda value: not value)] = field(
        default_factory=dict
    )
    """Of metrics that the program logs: where."""
    evaluate: Annotated[Evaluation | None, Field(exclude_if=lambda value: value is None)] = None
    """What measures the declared metrics; None where the program reports them."""
    profile: bool = False
    required_kernels: Annotated[Mapping[str, int | None], Field(exclude_if=lambda value: not value)] = field(
        default_factory=dict
    )
    """Calls in the profiled step of the kernels with a pattern in their name; None for at least one."""
    required_live: Annotated[Mapping[str, bool], Field(exclude_if=lambda value: not value)] = field(
        default_factory=dict
    )
    """Whether the program calls `ablate.live` with a name."""
    needs: Literal["process", "steps", "tokens"] = "process"
    """The marks that the deciding metric needs: none, of steps, or of steps with tokens."""
    resume_at: Annotated[int | None, Field(exclude_if=lambda value: value is None)] = None
    """Steps after which it is killed and started again; None without."""
    turns: Annotated[bool, Field(exclude_if=lambda value: not value)] = False
    """Whether turns end by the clock, for a program without marked steps."""
    steps: StepsConfig = field(default_factory=StepsConfig)
    devices: int = 1
    """Of each node."""
    nodes: Annotated[int, Field(exclude_if=lambda value: value == 1)] = 1
    seed: int = 0

    def back_ends(self) -> frozenset[str]:
        """Return the secrets that a node must have."""
        return frozenset(map(needed_secret, self.secrets))

    def code_problem(self, digest: str | None) -> str | None:
        """Return why this is not the digest of the code that a trial runs; None if it may be."""
        if (digest is None) == (self.code is None):
            return None
        return f"program.code is {digest}; the configuration has code {self.code!r}"

    @property
    def declared(self) -> Mapping[str, Literal["higher", "lower"]]:
        """Better direction of each metric that the program reports, by name."""
        return self.metrics

    @property
    def has_speed(self) -> bool:
        """Return whether its times are those of training, without the pause of a program that was killed."""
        return self.resume_at is None

    @property
    def flops_per_step(self) -> int:
        """Model FLOPs of a step, forward and backward; 0 where nobody knows."""
        return 0

    @property
    def trial_settings(self) -> Mapping[str, Any]:
        """Settings that the module in the trial gets besides those of every program."""
        return {}

    def origin_of(self, metric: str) -> str | None:
        """Return the line that the program prints with a metric, or where it logs it; None if it reports it."""
        if metric in self.logged:
            return str(self.logged[metric])
        return f"line: {self.lines[metric]}" if metric in self.lines else None

    @property
    def prepared(self) -> str | None:
        """Text of the program's code, and of the lock in it; None without files."""
        if self.code is None or self.lock is None:
            return None if self.code is None else canonical_json(self.code)
        return canonical_json([self.code, self.lock])

    @property
    def archive(self) -> str | None:
        """Digest of the archive with the program's code; None for other code."""
        return self.code.get(ARCHIVE) if isinstance(self.code, Mapping) else None

    @property
    def archives(self) -> frozenset[str]:
        """Digests of the archives with the code of the program and of its evaluation."""
        return super().archives | (frozenset() if self.judge is None else self.judge.archives)

    @property
    def judge(self) -> "ProgramArm | None":
        """The evaluation as a program of its own; None without one."""
        own = self.evaluate
        if own is None:
            return None
        bare = replace(
            self,
            args=(),
            evaluate=None,
            needs="process",
            profile=False,
            required_kernels={},
            required_live={},
            resume_at=None,
        )
        return replace(bare, command=own.command, code=own.code, env=own.env, lock=None)

    @property
    def libraries(self) -> tuple[Path, ...]:
        """The files and folders of its data."""
        return tuple(Path(one if isinstance(one, str) else one["path"]) for one in self.data)

    @property
    def sources(self) -> tuple[Path, ...]:
        """The folder or repository of the program's code; an archive lies in the folder of prepared data."""
        source = self.code.get("git") if isinstance(self.code, Mapping) else self.code
        return () if source is None else (Path(source),)

    @property
    def takes_seed(self) -> bool:
        """Whether an argument has the block's seed."""
        return any("{seed}" in argument for argument in (*self.command, *self.args))

    def argv(self, *, out: str) -> list[str]:
        """Return the program and its arguments with placeholders filled in."""
        values = {"{seed}": str(self.seed), "{out}": out, "{steps}": str(self.steps.total)}
        filled = []
        for argument in (*self.command, *self.args):
            for name, value in values.items():
                argument = argument.replace(name, value)
            filled.append(argument)
        return filled


def needs_of(metric: str) -> Literal["process", "steps", "tokens"]:
    """Return the marks that a deciding metric needs; a declared one is reported without marks, too."""
    if metric == "tokens_per_s":
        return "tokens"
    return "process" if metric in PROCESS_METRICS or metric not in METRICS else "steps"


def marked_steps(*, warmup: int, timed: int, in_slices_of: int = 0) -> StepsConfig:
    """Return the steps of a command, which has no passes and validation rows of ours."""
    return StepsConfig(warmup=warmup, warmup_s=0.0, timed=timed, slice=in_slices_of, val_rows=0)


def needed_secret(name: str) -> str:
    """Return the word with which a block asks for a secret, and a node offers it (service/store/nodes/placement)."""
    return f"{SECRET}:{name}"


def shared_fields(spec: AblationSpec) -> dict[str, Any]:
    """Return the fields of a configuration that commands and recipes of packages take from a spec alike."""
    workload = spec.workload
    return {
        "metrics": {name: metric.better for name, metric in workload.metrics.items()},
        "lines": {name: metric.line for name, metric in workload.metrics.items() if metric.line is not None},
        "logged": {name: place for name, metric in workload.metrics.items() if (place := metric.logged(name))},
        "profile": workload.profile or bool(workload.require_kernels),
        "needs": needs_of(spec.verdict.primary.metric),
        "secrets": tuple(sorted(workload.secrets)),
        "steps": marked_steps(
            warmup=workload.steps.warmup, timed=workload.steps.timed, in_slices_of=workload.steps.slice
        ),
        "devices": spec.placement.devices,
        "nodes": spec.placement.nodes,
    }


def requirements(workload: Workload, arm: str) -> dict[str, Any]:
    """Return the fields of an arm's configuration that say what has to run in it."""
    kernels = workload.require_kernels.get(arm, {})
    return {
        "required_kernels": {kernels: None} if isinstance(kernels, str) else kernels,
        "required_live": workload.require_live.get(arm, {}),
    }


def set_requirements(workload: dict[str, Any], of_arms: Mapping[str, tuple[Mapping[str, Any], str]]) -> None:
    """Give each arm what an arm of some workload requires, by the values of a spec; drop all other requirements."""
    for key in BY_ARM:
        required = {arm: (source.get(key) or {}).get(name) for arm, (source, name) in of_arms.items()}
        workload.pop(key, None)
        if any(required.values()):
            workload[key] = {arm: one for arm, one in required.items() if one}


def turn_problems(spec: AblationSpec) -> Iterator[SpecProblem]:
    """Find reasons why programs cannot take the turns that a spec asks for, and metrics that need one window."""
    yield from slice_problems(spec)
    yield from _process_turn_problems(spec)
    metric, where = spec.verdict.primary.metric, pointer("workload", "steps", "slice")
    if spec.workload.steps.slice and needs_of(metric) == "process":
        whose = "reported by the program" if metric not in METRICS else "a number of the whole process"
        detail = f"slices are for numbers of marked steps, and {metric} is {whose}: the turns of the others are in it"
        hint = f"decide by {listed(('cpu_step_s', *WINDOW_METRICS[:1]))}, or leave slice out"
        if metric == "cpu_s":
            hint = f"write workload.turns: true instead, or {hint}"
        yield SpecProblem(pointer=where, detail=detail, hint=hint)
    if spec.placement.nodes > 1:
        if spec.workload.steps.slice:
            detail = f"slices are for trials on one node; this spec has {spec.placement.nodes}"
            yield SpecProblem(pointer=where, detail=detail, hint="leave slice out, or use one node")
        if metric == CPU_STEP:
            detail = f"{metric} is measured on the node of the first rank, and this program runs on several"
            yield SpecProblem(pointer=pointer("verdict", "primary", "metric"), detail=detail, hint="use cpu_s")


def _process_turn_problems(spec: AblationSpec) -> Iterator[SpecProblem]:
    """Find reasons why whole processes cannot take turns, and metrics with the turns of the others in them."""
    if not spec.workload.turns:
        return
    where, metric = pointer("workload", "turns"), spec.verdict.primary.metric
    yield from together_problems(spec, where)
    if spec.placement.nodes > 1:
        detail = f"turns are for trials on one node; this spec has {spec.placement.nodes}"
        yield SpecProblem(pointer=where, detail=detail, hint="leave turns out, or use one node")
    if needs_of(metric) != "process":
        detail = f"{metric} is of marked steps, between which trials take turns by workload.steps.slice"
        yield SpecProblem(pointer=where, detail=detail, hint="write steps: {slice: ...} instead, or decide by cpu_s")
    elif metric not in METRICS:
        detail = f"{metric} is reported by the program, whose own clock has the turns of the others in it"
        yield SpecProblem(pointer=where, detail=detail, hint="decide by cpu_s, or leave turns out")
    if "process_s" in (metric, *(one.metric for one in spec.verdict.require)):
        detail = "process_s has waits in it, for example for a disk, which go on in the turns of the others"
        yield SpecProblem(pointer=where, detail=detail, hint="take cpu_s, or leave turns out")


def requirement_problems(spec: AblationSpec) -> Iterator[SpecProblem]:
    """Find requirements of arms that are not there."""
    arms = (BASELINE, *spec.variants)
    for key in BY_ARM:
        for name in getattr(spec.workload, key):
            if name not in arms:
                detail = f"'{name}' is no arm of this ablation; arms: {listed(arms)}"
                yield SpecProblem(pointer=pointer("workload", key, name), detail=detail, hint=nearest(name, arms))


def logged_problems(spec: AblationSpec) -> Iterator[SpecProblem]:
    """Find logged metrics that nobody could read, or that would not be where they are read."""
    workload = spec.workload
    for name, metric in workload.metrics.items():
        if metric.tracker is None:
            continue
        where = pointer("workload", "metrics", name, "from")
        if spec.placement.nodes > 1:
            detail = f"what is logged is read on one node, and this program runs on {spec.placement.nodes}"
            yield SpecProblem(pointer=where, detail=detail, hint=f"let it report {name}: trial.report({name}=...)")
        if workload.evaluate is not None:
            detail = "the protected evaluation measures all metrics, and reports or prints them"
            yield SpecProblem(pointer=where, detail=detail, hint=f"print METRIC {name}=... in it, or leave it out")
    trackers = sorted({metric.tracker for metric in workload.metrics.values() if metric.tracker is not None})
    ours = {variable: tracker for tracker in trackers for variable in TRACKER_VARIABLES[tracker]}
    places: dict[tuple[str, ...], Mapping[str, str]] = {("workload",): workload.env, ("baseline",): spec.baseline.env}
    places |= {("variants", name): own.env or {} for name, own in spec.variants.items()}
    for place, variables in places.items():
        for name in sorted(ours.keys() & variables.keys()):
            detail = f"the worker sets {name} for metrics from {ours[name]}, so that they stay in the trial's folder"
            yield SpecProblem(pointer=pointer(*place, "env", name), detail=detail, hint="leave it out")
