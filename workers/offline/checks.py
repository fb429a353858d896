"""The answers of `ablate check`, about a program from its runs, and about a spec from a short trial of every arm."""

import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import psutil

from ablate.experiments.analysis.placing import Kind, placed
from ablate.experiments.catalog.files import CONTENT_TYPE_OF_SUFFIX, content_type_of
from ablate.experiments.design.arms import resolve
from ablate.experiments.design.kinds.command import HIDDEN_FAILURES, CommandArm, hides_failures
from ablate.experiments.design.kinds.program import CLOCK_S, LEAST_MARKED, marked_steps
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.metrics import CPU_STEP
from ablate.experiments.design.plan import may_have_control
from ablate.experiments.design.spec import MIN_BLOCKS, AblationSpec
from ablate.experiments.errors import SpecError, SpecProblem
from ablate.experiments.outcomes import BASELINE
from ablate.experiments.records.program_report import ProgramReport, clocks_differ, printable, unmet_requirement
from ablate.experiments.records.receipts import ForeignProcess
from ablate.experiments.records.spec_code import PackedSpec, pack_spec
from ablate.experiments.reporting.wording import counted
from ablate.workers.blocks.surroundings import ANY_LOAD
from ablate.workers.commands.device_samples import GPU_WINDOW_S
from ablate.workers.devices.inventory import Devices, find_devices
from ablate.workers.offline.check_runs import CheckRun, WantedRun
from ablate.workers.trials.result import TrialResult

_WARMUP, _TIMED = 1, 5
"""Most steps of a short trial."""
_SHOWN_RESULTS = 20
_ROOM = 0.75
"""Share of the free memory that the trials of a block may take together."""
_NO_COUNTER = f"no counter that the worker may read, or a window of GPUs under {GPU_WINDOW_S:g} s"


@dataclass(frozen=True, kw_only=True)
class ProgramCheck:
    """One question about a program, and its answer."""

    name: str
    passed: bool
    detail: str
    needed: bool = True
    """Whether Ablate cannot measure without it."""


def checks_of(config: CommandArm, results: Sequence[TrialResult]) -> Iterator[ProgramCheck]:
    """Yield the answers about a program from its runs with `SEEDS`, fewer if one failed."""
    last = results[-1]
    if last.failure_class is not None:
        yield ProgramCheck(name="runs", passed=False, detail=f"{last.failure_class}: {last.message}")
        return
    report, first = last.program, results[0]
    if report is None:
        raise AssertionError("a program ended without a report")
    yield ProgramCheck(name="runs", passed=True, detail=f"{len(results)} times{_took(last)}")
    if hides_failures(config.command):
        detail = f"{HIDDEN_FAILURES}: write bash -o pipefail -c"
        yield ProgramCheck(name="pipe", passed=False, needed=False, detail=detail)
    if not report.ranks:
        detail = "no marks: only times of the whole process can decide (process_s, cpu_s); marks: docs/own-code.md"
        yield ProgramCheck(name="steps", passed=False, detail=detail)
        yield _reported(report.reported)
        return
    detail = f"{config.steps.total} of {config.steps.total}, by {report.ranks} rank{'s' * (report.ranks > 1)}"
    yield ProgramCheck(name="steps", passed=True, detail=detail)
    yield _tokens(last)
    yield _clock(report.window_s or 0.0, report.window_seen_s or 0.0)
    yield from _losses(results)
    echoed = report.seed is not None
    how = f"{report.seed}, as asked" if echoed else "not reported: read trial.seed, or write ablate.trial(seed=...)"
    yield ProgramCheck(name="seed", passed=echoed, needed=False, detail=how)
    peak = first.peak_reserved_bytes
    where = "of the largest process" if first.peak_allocated_bytes == peak else "reserved by torch's allocator"
    memory = "not visible" if peak is None else f"{peak / 2**20:,.0f} MiB, {where}"
    yield ProgramCheck(name="memory", passed=peak is not None, needed=False, detail=memory)
    yield _energy(report)
    yield _reported(report.reported)
    kernels = f"{len(report.kernels)} in one step" if report.kernels else "none: torch is not loaded"
    yield ProgramCheck(name="kernels", passed=bool(report.kernels), needed=False, detail=kernels)


def _energy(report: ProgramReport) -> ProgramCheck:
    detail = f"no number: {_NO_COUNTER}"
    if report.energy_j is not None:
        detail = f"{report.energy_j:.3g} J in the window, of the {report.energy_of}"
    return ProgramCheck(name="energy", passed=True, needed=False, detail=detail)  # the program cannot change it


def _took(result: TrialResult) -> str:
    if result.process_s is None:
        return "; its processes had to be ended after its first one, so process_s is not measured"
    return f", {result.process_s:.1f} s at last"


def _tokens(result: TrialResult) -> ProgramCheck:
    counts = sorted({step.tokens for step in result.program_steps})
    if not counts[0]:
        return ProgramCheck(name="tokens", passed=False, detail="a step without tokens: write step.report(tokens=...)")
    equal = f"{counts[0]:,} a step" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,} a step"
    return ProgramCheck(name="tokens", passed=True, detail=equal)


def _clock(window_s: float, seen_s: float) -> ProgramCheck:
    detail = f"a window of {window_s:.3g} s; the worker's clock differs by {1e3 * abs(window_s - seen_s):.2f} ms"
    if window_s < 100 * CLOCK_S:
        detail += "; a real window needs more steps"
    return ProgramCheck(name="clock", passed=not clocks_differ(window_s, seen_s), detail=detail)


def _losses(results: Sequence[TrialResult]) -> Iterator[ProgramCheck]:
    losses = [[step.loss for step in result.program_steps] for result in results]
    if any(loss is None for own in losses for loss in own):
        yield ProgramCheck(
            name="loss", passed=False, needed=False, detail="a step without loss: write step.report(loss=...)"
        )
        return
    shown = f"{losses[0][0]:.6g} to {losses[0][-1]:.6g}"
    exact = "bit for bit" if losses[0] == losses[1] else "not bit for bit: it is not deterministic"
    yield ProgramCheck(name="loss", passed=True, needed=False, detail=f"{shown}; a repeat agrees {exact}")
    uses = losses[2] != losses[0]
    detail = "another seed gives other losses" if uses else "another seed gives the same losses: the seed is ignored"
    yield ProgramCheck(name="seed matters", passed=uses, needed=False, detail=detail)


def _reported(values: Mapping[str, float]) -> ProgramCheck:
    shown = [f"{printable(name)}={value:.6g}" for name, value in values.items()]
    more = [f"and {len(shown) - _SHOWN_RESULTS:,} more"] if len(shown) > _SHOWN_RESULTS else []
    detail = ", ".join([*shown[:_SHOWN_RESULTS], *more])
    detail = detail or "nothing: write trial.report(name=value), or print METRIC name=value"
    return ProgramCheck(name="metrics", passed=bool(shown), needed=False, detail=detail)


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
        """Return the spec in a file, or on standard input, with its code packed. Raises SpecError and OSError."""
        if path == Path("-"):
            packed = pack_spec(sys.stdin.buffer.read(), CONTENT_TYPE_OF_SUFFIX[".yaml"], Path())
        else:
            packed = pack_spec(path.read_bytes(), content_type_of(path), path.parent)
        spec = parse_spec(packed.content, packed.content_type)
        if not spec.placement.node_class:
            spec = placed(packed.content, packed.content_type, spec, [_own_kind(find_devices())])[2]
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
        first = (self.spec.design.chosen_seeds or (1,))[0]
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

    def answer(
        self, runs: Sequence[CheckRun], *, node_class: str, load: float, others: Sequence[ForeignProcess]
    ) -> "SpecCheck":
        """Return the answers from the runs of `wanted`.

        `load` is the share of the cores that others took before, and `others` are the busiest of them.
        """
        by_arm = dict(zip(self.arms, runs, strict=False))
        trial_s = {name: _whole_s(run, self.arms[name]) for name, run in by_arm.items()}
        steps = [step.seconds for run in by_arm.values() for step in _result(run).program_steps[1:]]
        controls = [trial_s[BASELINE]] if may_have_control(self.spec) else []
        return SpecCheck(
            checks=(
                *self._checks(by_arm, runs[len(self.arms) :]),
                *self._machine(node_class, load, others),
            ),
            node_class=node_class,
            is_quiet=self._allows(load),
            can_take_turns=_can_take_turns([_result(run) for run in by_arm.values()], more=len(controls)),
            seed=_seed(_result(by_arm[BASELINE])),
            marks=_marks(_result(run) for run in by_arm.values()),
            step_s=statistics.median(steps) if steps else None,
            cpu_step_s=max((_result(run).cpu_step_s or 0.0 for run in by_arm.values()), default=0.0) or None,
            own_steps=min(_own_steps(by_arm.values()), default=None),
            longest_s=max(trial_s.values()),
            start_s=max(map(_start_s, by_arm.values())),
            block_s=sum([*trial_s.values(), *controls]),
            blocks=MIN_BLOCKS if self.spec.design.blocks.auto else self.spec.design.blocks.number,
        )

    def _checks(self, by_arm: Mapping[str, CheckRun], again: Sequence[CheckRun]) -> Iterator[ProgramCheck]:
        for name, run in by_arm.items():
            yield _of_arm(name, _result(run), run.wall_s, self.arms[name])
        for name in [*self.arms][len(by_arm) :]:
            yield ProgramCheck(name=name, passed=False, needed=False, detail="not run, because the first arm failed")
        yield from self._more_steps_than(min(_own_steps(by_arm.values()), default=math.inf))
        own = by_arm[BASELINE]
        if again and _result(own).failure_class is None and _result(again[0]).failure_class is None:
            yield self._seed_matters(_result(own), _result(again[0]))

    def _more_steps_than(self, own: float) -> Iterator[ProgramCheck]:
        """Yield why a loop of so many steps is too short for a trial."""
        steps = self.spec.workload.steps
        total, names = 1 + steps.warmup + steps.timed, f"the program's loop has {own:,} of its own, as in steps({own})"
        if own < LEAST_MARKED:
            detail = f"{names}; a trial needs {LEAST_MARKED}: the first, one to warm up and two to measure"
            yield ProgramCheck(name="steps", passed=False, detail=detail)
        elif own < total and "steps" in self.spec.workload.model_fields_set:
            detail = (
                f"{names}; a trial has {total:,}, so the loop goes on beyond its end: write fewer in workload.steps"
            )
            yield ProgramCheck(name="steps", passed=False, needed=False, detail=detail)

    def _allows(self, load: float) -> bool:
        allowed = self.spec.placement.max_foreign_load / 100
        return allowed >= ANY_LOAD or load <= allowed

    def _machine(self, node_class: str, load: float, others: Sequence[ForeignProcess]) -> Iterator[ProgramCheck]:
        wanted = self.spec.placement.node_class
        if node_class != wanted:
            detail = f"this machine is of class '{node_class}'; the spec asks for '{wanted}', so its times are others"
            yield ProgramCheck(name="node class", passed=False, needed=False, detail=detail)
        if self.spec.placement.nodes > 1:
            detail = f"the check ran on this node alone, the trials run over {self.spec.placement.nodes}: other times"
            yield ProgramCheck(name="nodes", passed=False, needed=False, detail=detail)
        if may_have_control(self.spec):
            quiet, names = self._allows(load), ", ".join(dict.fromkeys(one.name for one in others))
            detail = f"other programs use {load:.0%} of the cores" + (f" (busiest: {names})" if names else "")
            most = self.spec.placement.max_foreign_load
            detail += f"; allowed here: {'any load' if most / 100 >= ANY_LOAD else f'{most:g} %'}"
            by_work = self.spec.verdict.primary.metric in ("cpu_s", CPU_STEP)
            other_way = "" if by_work else ", or compare processor time (cpu_step_s, or cpu_s without marked steps)"
            detail += "" if quiet else f": close them{other_way}, or intervals get wider"
            yield ProgramCheck(name="load", passed=quiet, needed=False, detail=detail)

    def _seed_matters(self, first: TrialResult, other: TrialResult) -> ProgramCheck:
        metric = self.spec.verdict.primary.metric
        one, two = (result.program.reported[metric] if result.program else None for result in (first, other))
        detail = f"{metric} is {one:.6g} and {two:.6g} with two seeds"
        if one == two:
            detail += ": every block would report the same; if it takes a seed, pass it (--seed '{seed}' or trial.seed)"
        return ProgramCheck(name="seed", passed=one != two, detail=detail)


@dataclass(frozen=True, kw_only=True)
class SpecCheck:
    """The answers about a spec with a command."""

    checks: tuple[ProgramCheck, ...]
    node_class: str
    """Of this machine."""
    is_quiet: bool
    """Whether others took less of the cores before the runs than the spec allows."""
    can_take_turns: bool
    """Whether all trials of a block may run by turns: programs of at most one rank, for which the memory has room."""
    seed: int | None
    """The seed that the baseline reports."""
    marks: Literal["process", "steps", "tokens"]
    """What every arm marks: nothing, steps, or steps with tokens."""
    step_s: float | None
    """Median time of a step; None without marks."""
    cpu_step_s: float | None
    """Most processor time of a step of an arm; None without marks."""
    own_steps: int | None
    """Fewest steps of an arm's loop outside of a trial; None if no arm passes a number to `steps`."""
    start_s: float
    """Longest time of a trial outside of its steps."""
    longest_s: float
    """Estimated time of the longest trial."""
    block_s: float
    """Estimated time of a block, with a control arm where the noise may have to be measured."""
    blocks: int


def _short(config: CommandArm) -> CommandArm:
    steps = marked_steps(warmup=min(_WARMUP, config.steps.warmup), timed=min(_TIMED, config.steps.timed))
    resume_at = None if config.resume_at is None else min(config.resume_at, steps.total - 1)
    return replace(config, steps=steps, nodes=1, resume_at=resume_at)


def _result(run: CheckRun) -> TrialResult:
    return run.result or TrialResult.partial()


def _own_steps(runs: Iterable[CheckRun]) -> list[int]:
    return [own for run in runs if (own := _result(run).own_steps) is not None]


def _can_take_turns(results: Sequence[TrialResult], *, more: int) -> bool:
    """Return whether no trial has several ranks, and all, with `more` of the largest, leave a quarter of the memory."""
    peaks = [result.peak_reserved_bytes for result in results if result.peak_reserved_bytes is not None]
    ranks = {result.program and result.program.ranks for result in results}
    wanted = sum(peaks) + more * max(peaks, default=0)
    return ranks <= {0, 1} and len(peaks) == len(results) and wanted <= _ROOM * psutil.virtual_memory().available


def _seed(result: TrialResult) -> int | None:
    return None if result.program is None else result.program.seed


def _start_s(run: CheckRun) -> float:
    return run.wall_s - sum(step.seconds for step in _result(run).program_steps)


def _own_kind(own: Devices) -> Kind:
    smallest = min(device.memory_bytes for device in own.devices)
    return Kind(node_class=own.node_class.name, nodes=1, devices=len(own.devices), memory_bytes=smallest)


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


def _of_arm(name: str, result: TrialResult, wall_s: float, config: CommandArm) -> ProgramCheck:
    if result.failure_class is not None or result.program is None:
        return ProgramCheck(name=name, passed=False, detail=f"{result.failure_class}: {result.message}")
    if (problem := unmet_requirement(result.program, config)) is not None:
        return ProgramCheck(name=name, passed=False, detail=problem)
    steps = result.program_steps
    detail = f"{wall_s:.1f} s"
    if steps:
        detail += f", {counted(len(steps), 'step')}, {counted(steps[-1].tokens, 'token')} in the last one"
    elif result.process_s is not None:
        detail += f", process_s {result.process_s:.2f}"
    reported, evaluation = result.program.reported, result.program.evaluation
    measured = {name: reported[name] for name in evaluation.metrics} if evaluation is not None else {}
    own = {name: value for name, value in reported.items() if name not in measured}
    if own:
        detail += f"; {_reported(own).detail}"
    if evaluation is not None:
        detail += f"; {_reported(measured).detail} by the protected evaluation"
    return ProgramCheck(name=name, passed=True, detail=detail)
