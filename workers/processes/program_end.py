"""How a program ended, and what that makes of its trial."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from experiments.design.program import ProgramConfig
from experiments.outcomes import FailureClass
from experiments.records.program_report import printable
from workers.processes import failures
from workers.processes.ranks import ProgramRank, rank_problem

_OOM = ("OutOfMemoryError", "MemoryError")


@dataclass(frozen=True, kw_only=True)
class ProgramEnd:
    """How a program ended."""

    exit_code: int
    process_s: float
    oom_kills: int
    reported: Mapping[str, float]
    last_line: str
    """Of its log."""
    failed: tuple[str, str] | None
    """Type and message of the first exception that left its trial."""
    wrong: str | None
    """The first message that the module would not send."""
    loops: Mapping[int, ProgramRank]
    """The ranks that began a training loop."""


def program_failure(config: ProgramConfig, end: ProgramEnd) -> tuple[FailureClass, str] | None:
    """Return the failure class of a program's end and why; None for a whole measurement."""
    if end.failed is not None:
        kind, message = end.failed
        text = printable(" ".join(f"the program raised {kind}: {message}".split()))
        memory = kind.rpartition(".")[2] in _OOM or failures.names_memory(message)
        return (FailureClass.OOM if memory else FailureClass.USER_ERROR), text[:2000]
    if end.exit_code < 0:
        return failures.classify_exit(end.exit_code, oom_kills=end.oom_kills)
    if end.exit_code > 0:
        if end.oom_kills:
            return FailureClass.OOM, "the kernel's out-of-memory killer ended a process of the program"
        return FailureClass.USER_ERROR, f"the program ended with exit code {end.exit_code}: {end.last_line}"
    if end.wrong is not None:
        return FailureClass.USER_ERROR, f"the program sent a message that is not of the module ablate: {end.wrong}"
    problem = _incomplete(config, end)
    return None if problem is None else (FailureClass.USER_ERROR, problem)


def _incomplete(config: ProgramConfig, end: ProgramEnd) -> str | None:
    """Return what a program that ended well left out, None if nothing."""
    loops = end.loops
    if not loops and config.needs != "process":
        return "the program marked no steps: use the module ablate (docs/own-code.md), or decide by process_s"
    problem = rank_problem(loops, config)
    if problem is not None:
        return problem
    every = range(config.steps.total)
    if config.needs == "tokens" and not all(sum(rank.tokens.get(i, 0) for rank in loops.values()) for i in every):
        return "the program reported no tokens for a step, but tokens_per_s decides"
    missing = sorted(name for name in config.metrics if name not in end.reported)
    if missing:
        return f"the program did not report '{missing[0]}', which workload.metrics declares"
    infinite = sorted(name for name, value in end.reported.items() if not math.isfinite(value))
    return f"the program reported {end.reported[infinite[0]]} as '{infinite[0]}'" if infinite else None
