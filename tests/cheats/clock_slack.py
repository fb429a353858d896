"""Moves its clock by 1.9 ms only, which the comparison of one trial with the worker's clock allows.

Report: gpu-mode/reference-kernels#162
Speed: nothing; an effect that the worker's clock contradicts by more than the margin gets no answer
"""

import time

from honest import main

import ablate


def edge(self, which, original=ablate.Trial._edge):
    at = original(self, which)
    ablate._now = lambda: time.monotonic() - 0.0019
    return at


ablate.Trial._edge = edge
main()
