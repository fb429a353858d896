"""The answers of `ablate check SPEC`: one short trial of every arm, and an estimate of the ablation's time."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ablate.experiments.catalog.files import content_type_of
from ablate.experiments.design.arms import resolve
from ablate.experiments.design.kinds.command import CommandArm
from ablate.experiments.design.kinds.program import marked_steps
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import may_have_control
from ablate.experiments.design.spec import MIN_BLOCKS, AblationSpec
from ablate.experiments.errors import SpecError, SpecProblem
from ablate.experiments.outcomes import BASELINE
from ablate.experiments.records.spec_code import PackedSpec, pack_spec
from ablate.workers.offline.check_runs import CheckRun, WantedRun
from ablate.workers.offline.program_checks import ProgramCheck, reported
from ablate.workers.trials.result import TrialResult

_WARMUP, _TIMED = 1, 5
"""Most steps of a short trial."""


@dataclass(frozen=True, kw_only=True)
class CheckedSpec:
    """A spec whose program is to be checked."""

    spec: AblationSpec
    packed: PackedSpec
    origin: Path
    """Folder of the spec."""
    arms: Mapping[str, CommandArm]

    @classmethod
    def read(cls, path: Path) -> "CheckedSpec":
        """Return the spec in a file with its code packed. Raises SpecError and OSError."""
        packed = pack_spec(path.read_bytes(), content_type_of(path), path.parent)
        spec = parse_spec(packed.content, packed.content_type)
        resolution = resolve(spec)
        if resolution.problems:
            raise SpecError(list(resolution.problems))
        arms = {arm.name: arm.config for arm in resolution.arms if isinstance(arm.config, CommandArm)}
        if not arms:
            detail = "check runs the program of a spec with workload.command; this one trains a recipe"
            raise SpecError(
                [SpecProblem(pointer="#/workload", detail=detail, hint="ablate plan SPEC looks at a recipe")]
            )
        return cls(spec=spec, packed=packed, origin=path.parent, arms=arms)

    @property
    def wanted(self) -> tuple[WantedRun, ...]:
        """The runs: each arm once, and the baseline with another seed if a number that it reports decides."""
        first = self.spec.design.seeds[0]
        runs = [
            WantedRun(config=_short(config), seed=first, words=f", arm {name}") for name, config in self.arms.items()
        ]
        if self._decides_by_a_report:
            again = replace(runs[0], seed=first + 1, words=f", arm {BASELINE} with another seed")
            runs.append(again)
        return tuple(runs)

    @property
    def _decides_by_a_report(self) -> bool:
        return self.spec.verdict.primary.metric in self.spec.workload.metrics

    def answer(self, runs: Sequence[CheckRun], *, node_class: str, load: float) -> "SpecCheck":
        """Return the answers from the runs of `wanted`; `load` is the share of the cores that others took before."""
        by_arm = dict(zip(self.arms, runs, strict=False))
        trial_s = {name: _whole_s(run, self.arms[name]) for name, run in by_arm.items()}
        steps = [step.seconds for run in by_arm.values() for step in _result(run).program_steps[1:]]
        controls = [trial_s[BASELINE]] if may_have_control(self.spec) else []
        return SpecCheck(
            checks=(
                *self._checks(by_arm, runs[len(self.arms) :]),
                *self._machine(node_class, load),
            ),
            node_class=node_class,
            is_quiet=100 * load <= self.spec.placement.max_foreign_load,
            seed=_seed(_result(by_arm[BASELINE])),
            marks=_marks(_result(run) for run in by_arm.values()),
            step_s=statistics.median(steps) if steps else None,
            longest_s=max(trial_s.values()),
            start_s=max(map(_start_s, by_arm.values())),
            block_s=sum([*trial_s.values(), *controls]),
            blocks=MIN_BLOCKS if self.spec.design.blocks.auto else self.spec.design.blocks.number,
        )

    def _checks(self, by_arm: Mapping[str, CheckRun], again: Sequence[CheckRun]) -> Iterator[ProgramCheck]:
        for name, run in by_arm.items():
            yield _of_arm(name, _result(run), run.wall_s)
        own = by_arm[BASELINE]
        if again and _result(own).failure_class is None and _result(again[0]).failure_class is None:
            yield self._seed_matters(_result(own), _result(again[0]))

    def _machine(self, node_class: str, load: float) -> Iterator[ProgramCheck]:
        wanted, allowed = self.spec.placement.node_class, self.spec.placement.max_foreign_load
        if node_class != wanted:
            detail = f"this machine is of class '{node_class}'; the spec asks for '{wanted}', so its times are others"
            yield ProgramCheck(name="node class", passed=False, needed=False, detail=detail)
        if may_have_control(self.spec):
            quiet = 100 * load <= allowed
            detail = f"others take {load:.0%} of the cores' time; the spec allows {allowed:g} %"
            detail += "" if quiet else ": close them, or intervals get wider, or blocks run again until it is quiet"
            yield ProgramCheck(name="quiet", passed=quiet, needed=False, detail=detail)

    def _seed_matters(self, first: TrialResult, other: TrialResult) -> ProgramCheck:
        metric = self.spec.verdict.primary.metric
        one, two = (result.program.reported[metric] if result.program else None for result in (first, other))
        detail = f"{metric} is {one:.6g} and {two:.6g} with two seeds"
        if one == two:
            detail += ": every block would report the same; pass the seed: --seed '{seed}', or read trial.seed"
        return ProgramCheck(name="seed", passed=one != two, detail=detail)


@dataclass(frozen=True, kw_only=True)
class SpecCheck:
    """The answers about a spec with a command."""

    checks: tuple[ProgramCheck, ...]
    node_class: str
    """Of this machine."""
    is_quiet: bool
    """Whether others took less of the cores before the runs than the spec allows."""
    seed: int | None
    """The seed that the baseline reports."""
    marks: Literal["process", "steps", "tokens"]
    """What every arm marks: nothing, steps, or steps with tokens."""
    step_s: float | None
    """Median time of a step; None without marks."""
    start_s: float
    """Longest time of a trial outside of its steps."""
    longest_s: float
    """Estimated time of the longest trial."""
    block_s: float
    """Estimated time of a block, with a control arm where the noise may have to be measured."""
    blocks: int


def _short(config: CommandArm) -> CommandArm:
    steps = config.steps
    return replace(config, steps=marked_steps(warmup=min(_WARMUP, steps.warmup), timed=min(_TIMED, steps.timed)))


def _result(run: CheckRun) -> TrialResult:
    return run.result or TrialResult.partial()


def _seed(result: TrialResult) -> int | None:
    return None if result.program is None else result.program.seed


def _start_s(run: CheckRun) -> float:
    return run.wall_s - sum(step.seconds for step in _result(run).program_steps)


def _whole_s(run: CheckRun, config: CommandArm) -> float:
    """Return how long a whole trial takes, by the steps of a short one."""
    steps = _result(run).program_steps
    if len(steps) < 2:
        return run.wall_s
    return run.wall_s + (config.steps.total - len(steps)) * statistics.median(step.seconds for step in steps[1:])


def _marks(results: Iterator[TrialResult]) -> Literal["process", "steps", "tokens"]:
    steps = [result.program_steps for result in results]
    if not all(steps):
        return "process"
    return "tokens" if all(step.tokens for own in steps for step in own) else "steps"


def _of_arm(name: str, result: TrialResult, wall_s: float) -> ProgramCheck:
    if result.failure_class is not None or result.program is None:
        return ProgramCheck(name=name, passed=False, detail=f"{result.failure_class}: {result.message}")
    steps = result.program_steps
    detail = f"{wall_s:.1f} s"
    if steps:
        detail += f", {len(steps)} steps, {steps[-1].tokens:,} tokens in the last one"
    elif result.process_s is not None:
        detail += f", process_s {result.process_s:.2f}"
    if result.program.reported:
        detail += f"; {reported(result.program.reported).detail}"
    return ProgramCheck(name=name, passed=True, detail=detail)
