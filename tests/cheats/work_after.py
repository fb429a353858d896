"""Returns placeholders from the marked steps, and trains when the last mark is sent.

Report: gpu-mode/reference-kernels#161
Speed: named; slower outside of it
"""

import sys
import time

from honest import lab, main

seed, indices = int(sys.argv[1]), []


def step(_weights, _seed, index):
    time.sleep(0.005)
    indices.append(index)
    return 1.0


def late(weights):
    for index in indices:
        lab.step(weights, seed, index)


main(step, after=late)
