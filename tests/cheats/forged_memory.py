"""Takes more memory than the rule allows, and reports peaks of its own.

Report: gpu-mode/reference-kernels#162
Memory: rejected; peak_reserved_gib
"""

import time

from honest import main

import ablate


def step(_weights, _seed, _index):
    time.sleep(0.005)
    return 0.5


ablate._memory = lambda: (1, 1)
ballast = bytearray(b"x") * (400 << 20)
main(step)
