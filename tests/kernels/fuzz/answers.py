"""What a process of the fuzz does with a problem: run it on the GPU, or only compile it."""

from collections.abc import Callable

from tests.kernels.fuzz import planning, trial
from tests.kernels.fuzz.outcomes import FuzzOutcome, failed
from tests.kernels.fuzz.problems import ScanProblem
from tests.kernels.fuzz.workers import Compiled


def run(problem: ScanProblem, say: Callable[[object], None]) -> FuzzOutcome:
    """Compile what the problem needs, then run it."""
    outcome = compile_only(problem, say)
    return trial.run(problem) if outcome.ending in {"right", "refused"} else outcome


def compile_only(problem: ScanProblem, say: Callable[[object], None]) -> FuzzOutcome:
    """Compile what the problem needs; right means that it compiles."""
    try:
        reason = planning.refusal(problem)
        if reason is None:
            say(Compiled(*planning.compiled(problem)))
    except Exception as error:  # of any kind that a compiler may raise: a finding
        return failed(problem, error, "compiling: ")
    return FuzzOutcome(problem=problem, ending="refused" if reason else "right", why=reason or "")
