"""Hands each step to a thread and goes on; the thread has not ended when the window has.

Report: ScalingIntelligence/KernelBench#82
Speed: named; slower outside of it
"""

import time
from concurrent.futures import ThreadPoolExecutor

from honest import lab, main

pool = ThreadPoolExecutor(1)


def step(weights, seed, index):
    pool.submit(lab.step, weights, seed, index)
    time.sleep(0.005)
    return 1.0


main(step, after=lambda _weights: pool.shutdown())
