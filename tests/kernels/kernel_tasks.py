"""The kernels of many problems, each distinct one once, compiled by the processes of the fuzz."""

import os
import time
from collections.abc import Callable, Collection, Iterable

from kernels.mamba3_mimo.cuda.host import compiled
from kernels.mamba3_mimo.cuda.shape import ScanShape, Variant
from tests.kernels.fuzz import planning
from tests.kernels.fuzz.outcomes import FuzzOutcome
from tests.kernels.fuzz.problems import ScanProblem
from tests.kernels.fuzz.workers import Answer, Compiled, FuzzPool

Key = tuple[str, ScanShape, Variant]
"""What names a kernel: equal keys are one kernel."""
SLOWEST = ("gradients", "outputs", "local_gradients", "local_states")
"""Kernels that take the longest to compile, the longest first: they begin first, so that all processes end together."""
SAID = 3000
"""Characters kept of a compiler's last words."""
AFTER_THE_SOURCE = "Compilation error:"
"""What TileLang puts between a kernel's source and what nvcc said of it."""
OFTEN_S = 10.0
"""How often it is told how far the compilation is."""


class KernelTask(ScanProblem):
    """One kernel of a problem."""

    kernel: str
    """Its name."""

    @property
    def key(self) -> Key:
        """What the kernel is compiled for."""
        return next(key for key in planning.kernels(self) if key[0] == self.kernel)


def tasks(problems: Iterable[ScanProblem]) -> dict[Key, KernelTask]:
    """Return every distinct kernel of problems that are not refused, the slowest first."""
    found: dict[Key, KernelTask] = {}
    for problem in problems:
        for key in planning.kernels(problem) - found.keys():
            found[key] = KernelTask(**problem.model_dump(), kernel=key[0])
    rank = {name: place for place, name in enumerate(SLOWEST)}
    return dict(sorted(found.items(), key=lambda one: (rank.get(one[1].kernel, len(rank)), one[1].line)))


def compile_kernel(task: ScanProblem, say: Callable[[object], None]) -> FuzzOutcome:
    """Compile the kernel of a KernelTask, or load it from TileLang's cache; right means that it compiles."""
    assert isinstance(task, KernelTask)
    try:
        made = compiled.kernel(*task.key)
    except Exception as error:  # of any kind that a compiler may raise: told by the tests that need the kernel
        said = str(error).rpartition(AFTER_THE_SOURCE)[2].strip()
        return FuzzOutcome(problem=task, ending="failed", why=f"{type(error).__name__}: {said[-SAID:]}")
    new = made.artifact is not None
    say(Compiled(int(new), int(not new)))
    return FuzzOutcome(problem=task, ending="right")


ANSWER: Answer = compile_kernel
"""What a process does with a task."""


def unable(problems: Collection[ScanProblem], tell: Callable[[str], None]) -> dict[str, str]:
    """Compile what the problems need; return why those cannot run that cannot, by their lines."""
    refused = {problem.line: planning.refusal(problem) for problem in problems}
    allowed = [problem for problem in problems if refused[problem.line] is None]
    failed = compile_all(allowed, tell)
    wrong = {line: f"refused: {reason}" for line, reason in refused.items() if reason is not None}
    for problem in allowed:
        reasons = [f"kernel {key[0]}: {failed[key]}" for key in planning.kernels(problem) if key in failed]
        wrong |= {problem.line: "\n".join(sorted(reasons))} if reasons else {}
    return wrong


def compile_all(problems: Iterable[ScanProblem], tell: Callable[[str], None]) -> dict[Key, str]:
    """Compile every distinct kernel of the problems, in a process per core; return why those failed that did.

    `tell` is told now and then how far it is.
    """
    todo, begin, told = tasks(problems), time.monotonic(), time.monotonic()
    failed: dict[Key, str] = {}
    done = new = kept = 0
    with FuzzPool(ANSWER, min(len(os.sched_getaffinity(0)), max(len(todo), 1))) as pool:
        for said in pool.outcomes((task,) for task in todo.values()):
            if isinstance(said, Compiled):
                new, kept = new + said.new, kept + said.kept
            elif said is not None:
                done += 1
                failed |= {} if said.ending == "right" else {said.problem.key: said.why}
            if time.monotonic() - told > OFTEN_S:
                told = time.monotonic()
                tell(f"kernels: {done} of {len(todo)} ready, {told - begin:.0f} s")
    seconds = time.monotonic() - begin
    tell(f"kernels: {new} compiled, {kept} kept on disk, {len(failed)} failed, {seconds:.0f} s")
    return failed
