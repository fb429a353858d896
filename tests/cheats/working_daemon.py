"""Leaves the work to a process that is still at it when the program ends.

Report: gpu-mode/reference-kernels#161
Speed: named; had to be ended
Judged: no answer; so its blocks repeat one run
"""

import os
import sys
import time

from honest import lab, main

if os.fork() == 0:
    os.setsid()
    done = [0.0] * lab.WIDTH
    for index in range(10_000):
        lab.step(done, int(sys.argv[1]), index)
    os._exit(0)


def step(_weights, _seed, _index):
    time.sleep(0.005)
    return 0.5


main(step)
