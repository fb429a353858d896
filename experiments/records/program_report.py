"""How a command was run in a trial, and the program's own reports."""

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from ablate.experiments.design.kinds.program import CLOCK_S, CLOCK_SHARE, ProgramArm
from ablate.experiments.design.problems import listed
from ablate.experiments.documents import Frozen
from ablate.experiments.in_trial.ablate_profile import REST
from ablate.experiments.kernel_pattern import KernelPattern, nearest_names
from ablate.model.measurements import OmitNone

MOST_KERNEL_US = 1e12
"""Longest time of a kernel in one step: eleven days, which no trial may take."""
KernelRows: TypeAlias = tuple[
    tuple[str, Annotated[int, Field(ge=0)], Annotated[float, Field(ge=0, le=MOST_KERNEL_US, allow_inf_nan=False)]],
    ...,
]
"""Name, calls and microseconds of each kernel in one step."""
LoggedCurve: TypeAlias = tuple[tuple[int, Annotated[float, Field(allow_inf_nan=False)]], ...]
_NAME_LENGTH, _MOST_SHOWN = 80, 10
OUT = "{out}"
"""Stands in a stored argument for the trial's folder, which differs in every trial."""


class EvaluationReport(Frozen):
    """The record of a protected evaluation, which ran after the program in processes of its own."""

    argv: tuple[str, ...]
    """As the program's."""
    code: str
    """Digest of the files that it ran in."""
    metrics: tuple[str, ...]
    """Names of the numbers that it measured."""
    exit_code: int


class ProgramReport(Frozen):
    """The record of a command beside its steps."""

    argv: tuple[str, ...]
    """Program and arguments; the trial's folder is written as {out}."""
    code: OmitNone[str] = None
    """Digest of the files that the program ran in, or of a recipe's package; None without files."""
    interpreter: OmitNone[str] = None
    """Such as "CPython 3.12.4"; None if the program did not import the module `ablate`."""
    packages: OmitNone[str] = None
    """Digest of names and versions of all packages that the interpreter can import."""
    seed: OmitNone[int] = None
    """The seed that the program reported; None without."""
    ranks: Annotated[int, Field(ge=0)]
    """Processes that marked steps."""
    rank_tokens: OmitNone[tuple[Annotated[int, Field(ge=0)], ...]] = None
    """Tokens of the timed steps by rank; None of a program with one rank."""
    rank_step_s: OmitNone[tuple[float, ...]] = None
    """Median seconds of a timed step by rank, without the time in which it waited for others as far as the program says
    so; None of a program with one rank."""
    rank_nodes: OmitNone[tuple[str, ...]] = None
    """Node of each rank of a trial over several nodes."""
    window_s: OmitNone[float] = None
    """Seconds of the slowest rank's window by the program's clock."""
    window_seen_s: OmitNone[float] = None
    """Seconds between the arrivals of the same two marks at the worker."""
    loading_s: OmitNone[Annotated[float, Field(ge=0, allow_inf_nan=False)]] = None
    """Seconds of this window in which the slowest rank waited for data, as the program says; None if it does not."""
    energy_j: OmitNone[Annotated[float, Field(ge=0, allow_inf_nan=False)]] = None
    """Joules of the window by the counters of `energy_of`; None where there are none."""
    energy_of: OmitNone[Literal["GPUs", "processor packages"]] = None
    """The trial's GPUs, or the processors of the machine with everything that ran on them."""
    reported: Mapping[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(default_factory=dict)
    """Numbers that the program reported at its end, and those that the evaluation measured."""
    evaluation: OmitNone[EvaluationReport] = None
    """None of a program without one, and of one that failed before it."""
    contradicted: Mapping[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(
        default_factory=dict, exclude_if=lambda numbers: not numbers
    )
    """Printed numbers that contradict the number of the same name in `reported`, which counts; also numbers of
    the program that contradict those of the evaluation."""
    curves: Annotated[Mapping[str, LoggedCurve], Field(exclude_if=lambda curves: not curves)] = Field(
        default_factory=dict
    )
    """Step and number of each metric that the program logged, or number of the line and number of each that it printed,
    at most 400, without those that are not finite."""
    kernels: KernelRows = ()
    """Name, calls and microseconds of each kernel in one step after the window; operators where the CPU computes."""
    live: Annotated[tuple[str, ...], Field(exclude_if=lambda names: not names)] = ()
    """Names that a rank passed to `ablate.live`."""
    resumed_from: OmitNone[int] = None
    """Of a program that was killed and started again: the first step that it ran then."""
    repeated_otherwise: OmitNone[tuple[int, float, float]] = None
    """The first step that it ran twice with two losses: before it was killed, and after."""
    exit_code: int


def contradicts(printed: float, counted: float) -> bool:
    """Return whether a printed number is another one than `counted`, rounded to the printed decimal places."""
    places = max(1, -int(Decimal(repr(printed)).as_tuple().exponent))
    return abs(printed - counted) > 0.5 * 10.0**-places + math.ulp(counted)


def clocks_differ(window_s: float, seen_s: float) -> bool:
    """Return whether the program's clock and the worker's disagree about the window."""
    return abs(window_s - seen_s) > CLOCK_SHARE * seen_s + CLOCK_S


def unmet_requirement(report: ProgramReport, config: ProgramArm) -> str | None:
    """Say which kernel or code path that the arm requires did not run, or ran against it; None if all is met."""
    problems = [_kernel_problem(report.kernels, *one) for one in config.required_kernels.items()]
    called = listed([f"'{name}'" for name in report.live[:_MOST_SHOWN]]) if report.live else "nothing"
    problems += [
        f"require_live asks for '{name}': {str(required).lower()}; the program called ablate.live with {called}"
        for name, required in config.required_live.items()
        if (name in report.live) != required
    ]
    return next(filter(None, problems), None)


def _kernel_problem(rows: KernelRows, pattern: str, calls: int | None) -> str | None:
    what = f"a kernel that matches '{pattern}'" if calls is None else f"{calls:,} calls of kernels like '{pattern}'"
    what = f"require_kernels asks for {what} in the profiled step"
    if not rows:
        return f"{what}, and there is no table of kernels: the program marks no steps, or does not use torch"
    compiled, named = KernelPattern(pattern), [row for row in rows if row[0] != REST]
    names = list(dict.fromkeys(name for name, _calls, _us in named))
    counted = sum(number for name, number, _us in named if compiled.search(name))
    if counted < (1 if calls is None else calls):
        nearest = ", ".join(f"'{shorten(name)}'" for name in nearest_names(pattern, names))
        says = f"it has {counted:,}" if counted else f"none of its {len(names)} is"
        return f"{what}; {says}, the nearest are {nearest}"
    if calls is not None and counted > calls:
        example = next(name for name in names if compiled.search(name))
        return f"{what}; it has {counted:,}, such as of '{shorten(example)}'"
    if calls is not None and len(named) < len(rows):
        return f"{what}; the table has only the {len(named)} longest kernels, and others may match"
    return None


def printable(name: str) -> str:
    """Return a name that a program chose, with its control characters replaced."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)


def shorten(name: str) -> str:
    """Return the first characters of a kernel's name."""
    name = printable(name)
    return name if len(name) <= _NAME_LENGTH else f"{name[:_NAME_LENGTH]}..."


def report_contradictions(report: ProgramReport, config: ProgramArm, timed_s: float | None) -> Iterator[str]:
    """Find contradictions of a report to the configuration and to the seconds of the timed steps, None without."""
    expected = config.argv(out=OUT)
    if list(report.argv) != expected:
        yield f"program.argv is {list(report.argv)}; the configuration gives {expected}"
    if problem := config.code_problem(report.code):
        yield problem
    if report.seed is not None and report.seed != config.seed:
        yield f"the program trained with seed {report.seed}; the block has seed {config.seed}"
    if problem := unmet_requirement(report, config):
        yield problem
    yield from (
        f"the program did not report '{name}'" for name in sorted(config.metrics.keys() - report.reported.keys())
    )
    if (report.resumed_from is None) != (config.resume_at is None):
        yield f"the program was resumed from step {report.resumed_from}; the configuration says {config.resume_at}"
    yield from _evaluation_contradictions(report, config)
    yield from _window_contradictions(report, timed_s)


def _evaluation_contradictions(report: ProgramReport, config: ProgramArm) -> Iterator[str]:
    own, judge = report.evaluation, config.judge
    if own is None or judge is None:
        if (own is None) != (judge is None):
            yield f"program.evaluation is {own and own.argv}; the configuration has {judge and judge.argv(out=OUT)}"
        return
    if list(own.argv) != judge.argv(out=OUT):
        yield f"program.evaluation.argv is {list(own.argv)}; the configuration gives {judge.argv(out=OUT)}"
    yield from (f"the evaluation did not measure '{name}'" for name in sorted(config.metrics.keys() - set(own.metrics)))
    yield from (f"the evaluation's '{name}' is missing" for name in own.metrics if name not in report.reported)


def _window_contradictions(report: ProgramReport, timed_s: float | None) -> Iterator[str]:
    if report.window_s is None or report.window_seen_s is None:
        if timed_s is not None:
            yield "the window has no clocks"
        return
    if timed_s is None or not math.isclose(timed_s, report.window_s, rel_tol=1e-9, abs_tol=1e-6):
        yield f"program.window_s is {report.window_s:.6g}; the timed steps give {timed_s}"
    if report.loading_s is not None and report.loading_s > report.window_s + CLOCK_S:
        yield f"the program waited {report.loading_s:.6g} s for data in a window of {report.window_s:.6g} s"
    if clocks_differ(report.window_s, report.window_seen_s):
        yield (
            f"the program's clock gives its window {report.window_s:.6g} s, the worker's {report.window_seen_s:.6g} s; "
            f"allowed: {CLOCK_SHARE:.1%} and {1e3 * CLOCK_S:g} ms"
        )
