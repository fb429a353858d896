"""Answers for tests of the fuzz's processes: what a process does is written in the number of heads."""

import os
import time
from unittest import mock

from tests.kernels.fuzz.outcomes import FuzzOutcome
from tests.kernels.fuzz.workers import Compiled

REFUSED, HANGS, ENDS, NO_TARGET = 2, 3, 4, 5


def answer(problem, say):
    """Hang, end or answer as `problem.H` says."""
    say(Compiled(1, 2))
    if problem.H == HANGS:
        time.sleep(60)
    if problem.H == ENDS:
        os._exit(3)
    return FuzzOutcome(problem=problem, ending="refused" if problem.H == REFUSED else "right")


def compiled_decays(task, say):
    """Compile the decays, for a GPU that nvcc has forgotten if `task.H` says so; call other kernels right."""
    from kernels.mamba3_mimo.cuda.host import compiled
    from tests.kernels.kernel_tasks import compile_kernel

    if task.kernel != "decays":
        return FuzzOutcome(problem=task, ending="right")
    with mock.patch.dict(compiled.TARGET, {"arch": "sm_52"} if task.H == NO_TARGET else {}):
        return compile_kernel(task, say)
