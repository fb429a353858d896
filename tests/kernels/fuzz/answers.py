"""Functions that a process of the fuzz calls with a problem: run it on the GPU, or only compile it."""

from collections.abc import Callable

from tests.kernels.fuzz import planning, trial
from tests.kernels.fuzz.outcomes import FuzzOutcome, failed
from tests.kernels.fuzz.problems import ScanProblem
from tests.kernels.fuzz.workers import Compiled


def run(problem: ScanProblem, report: Callable[[object], None]) -> FuzzOutcome:
    """Compile the kernels of the problem, then run it."""
    outcome = compile_only(problem, report)
    return trial.run(problem) if outcome.ending in {"right", "refused"} else outcome


def compile_only(problem: ScanProblem, report: Callable[[object], None]) -> FuzzOutcome:
    """Compile the kernels of the problem. "right" means that they compile."""
    try:
        reason = planning.refusal(problem)
        if reason is None:
            report(Compiled(*planning.compiled(problem)))
    except Exception as error:  # of any kind that a compiler may raise
        return failed(problem, error, "compiling: ")
    return FuzzOutcome(problem=problem, ending="refused" if reason else "right", why=reason or "")
