"""The answers of `ablate check` about one program, from the results of its runs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ablate.experiments.design.kinds.command import HIDDEN_FAILURES, CommandArm, hides_failures
from ablate.experiments.design.kinds.program import CLOCK_S
from ablate.experiments.records.program_report import clocks_differ, printable
from ablate.workers.trials.result import TrialResult

_SHOWN_RESULTS = 20


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
        detail = "no marks: only the time of the whole process can decide (process_s); docs/own-code.md shows the marks"
        yield ProgramCheck(name="steps", passed=False, detail=detail)
        yield reported(report.reported)
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
    yield reported(report.reported)
    kernels = f"{len(report.kernels)} in one step" if report.kernels else "none: torch is not loaded"
    yield ProgramCheck(name="kernels", passed=bool(report.kernels), needed=False, detail=kernels)


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


def reported(values: Mapping[str, float]) -> ProgramCheck:
    """Return the answer about the numbers that a program reports."""
    shown = [f"{printable(name)}={value:.6g}" for name, value in values.items()]
    more = [f"and {len(shown) - _SHOWN_RESULTS:,} more"] if len(shown) > _SHOWN_RESULTS else []
    detail = ", ".join([*shown[:_SHOWN_RESULTS], *more])
    detail = detail or "nothing: write trial.report(name=value), or print METRIC name=value"
    return ProgramCheck(name="metrics", passed=bool(shown), needed=False, detail=detail)
