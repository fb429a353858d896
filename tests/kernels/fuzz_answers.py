"""Answers for tests of the fuzz's processes. The number of heads selects the behaviour."""

import os
import time
from unittest import mock

from tests.kernels.fuzz.outcomes import FuzzOutcome
from tests.kernels.fuzz.workers import Compiled

REFUSED, HANGS, ENDS, NO_TARGET = 2, 3, 4, 5


def answer(problem, report):
    """Hang, end or answer, depending on `problem.H`."""
    report(Compiled(1, 2))
    if problem.H == HANGS:
        time.sleep(60)
    if problem.H == ENDS:
        os._exit(3)
    return FuzzOutcome(problem=problem, ending="refused" if problem.H == REFUSED else "right")


def compiled_decays(task, report):
    """Compile the decays, for a GPU unknown to nvcc if `task.H` is NO_TARGET; other kernels are right."""
    from kernels.mamba3_mimo.cuda.host import compiled
    from tests.kernels.kernel_tasks import compile_kernel

    if task.kernel != "decays":
        return FuzzOutcome(problem=task, ending="right")
    with mock.patch.dict(compiled.TARGET, {"arch": "sm_52"} if task.H == NO_TARGET else {}):
        return compile_kernel(task, report)
