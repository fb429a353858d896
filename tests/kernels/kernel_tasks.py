"""Distinct kernels of many problems, compiled by the processes of the fuzz."""

import os
import time
from collections.abc import Callable, Collection, Iterable

from ablate.kernels.mamba3_mimo.cuda.host import compiled
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant
from tests.kernels.fuzz import planning
from tests.kernels.fuzz.outcomes import FuzzOutcome
from tests.kernels.fuzz.problems import ScanProblem
from tests.kernels.fuzz.workers import Answer, Compiled, FuzzPool

Key = tuple[str, ScanShape, Variant]
"""Identity of a kernel: equal keys are one kernel."""
SLOWEST = ("gradients", "outputs", "local_gradients", "local_states")
"""Kernels with the longest compilation, which start first so that all processes end together."""
MESSAGE_LIMIT = 3000
"""Characters of a compiler's message to store."""
AFTER_THE_SOURCE = "Compilation error:"
"""TileLang's separator between a kernel's source and nvcc's message."""
REPORT_S = 10.0
"""Seconds between progress reports."""


class KernelTask(ScanProblem):
    """One kernel of a problem."""

    kernel: str
    """Its name."""

    @property
    def key(self) -> Key:
        """Key of the compiled kernel."""
        return next(key for key in planning.kernels(self) if key[0] == self.kernel)


def tasks(problems: Iterable[ScanProblem]) -> dict[Key, KernelTask]:
    """Return the distinct kernels of problems that are not refused, the slowest first."""
    by_key: dict[Key, KernelTask] = {}
    for problem in problems:
        for key in planning.kernels(problem) - by_key.keys():
            by_key[key] = KernelTask(**problem.model_dump(), kernel=key[0])
    rank = {name: place for place, name in enumerate(SLOWEST)}
    return dict(sorted(by_key.items(), key=lambda one: (rank.get(one[1].kernel, len(rank)), one[1].line)))


def compile_kernel(task: ScanProblem, report: Callable[[object], None]) -> FuzzOutcome:
    """Compile the kernel of a KernelTask or load it from TileLang's cache. "right" means that it compiles."""
    assert isinstance(task, KernelTask)
    try:
        kernel = compiled.kernel(*task.key)
    except Exception as error:  # of any kind that a compiler may raise; the tests that need the kernel show it
        message = str(error).rpartition(AFTER_THE_SOURCE)[2].strip()
        return FuzzOutcome(problem=task, ending="failed", why=f"{type(error).__name__}: {message[-MESSAGE_LIMIT:]}")
    new = kernel.artifact is not None
    report(Compiled(int(new), int(not new)))
    return FuzzOutcome(problem=task, ending="right")


ANSWER: Answer = compile_kernel
"""Function that a process calls with a task."""


def unable(problems: Collection[ScanProblem], report: Callable[[str], None]) -> dict[str, str]:
    """Compile the kernels of the problems; return line of a problem -> reason why it cannot run."""
    refused = {problem.line: planning.refusal(problem) for problem in problems}
    allowed = [problem for problem in problems if refused[problem.line] is None]
    failed = compile_all(allowed, report)
    wrong = {line: f"refused: {reason}" for line, reason in refused.items() if reason is not None}
    for problem in allowed:
        reasons = [f"kernel {key[0]}: {failed[key]}" for key in planning.kernels(problem) if key in failed]
        wrong |= {problem.line: "\n".join(sorted(reasons))} if reasons else {}
    return wrong


def compile_all(problems: Iterable[ScanProblem], report: Callable[[str], None]) -> dict[Key, str]:
    """Compile the distinct kernels of the problems in a process per core; return key of a kernel -> its error.

    `report` receives the progress.
    """
    todo, begin, reported = tasks(problems), time.monotonic(), time.monotonic()
    failed: dict[Key, str] = {}
    done = new = kept = 0
    with FuzzPool(ANSWER, min(len(os.sched_getaffinity(0)), max(len(todo), 1))) as pool:
        for event in pool.outcomes((task,) for task in todo.values()):
            if isinstance(event, Compiled):
                new, kept = new + event.new, kept + event.kept
            elif event is not None:
                done += 1
                failed |= {} if event.ending == "right" else {event.problem.key: event.why}
            if time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                report(f"kernels: {done} of {len(todo)} ready, {reported - begin:.0f} s")
    seconds = time.monotonic() - begin
    report(f"kernels: {new} compiled, {kept} kept on disk, {len(failed)} failed, {seconds:.0f} s")
    return failed
