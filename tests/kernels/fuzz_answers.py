"""Answers for tests of the fuzz's processes: what a process does is written in the number of heads."""

import os
import time

from kernels.mamba3_mimo.fuzz.outcomes import FuzzOutcome
from kernels.mamba3_mimo.fuzz.workers import Compiled

REFUSED, HANGS, ENDS = 2, 3, 4


def answer(problem, say):
    """Hang, end or answer as `problem.H` says."""
    say(Compiled(1, 2))
    if problem.H == HANGS:
        time.sleep(60)
    if problem.H == ENDS:
        os._exit(3)
    return FuzzOutcome(problem=problem, ending="refused" if problem.H == REFUSED else "right")
