"""Trains nothing, and reports losses that fall as those of a training do.

Report: gpu-mode/pygpubench#7
Speed: kept; losses and tokens are the program's own words
Judged: no answer; so its blocks repeat one run
"""

import math
import random
import time

from honest import main


def step(_weights, seed, index):
    time.sleep(0.005)
    return 0.69 * math.exp(-index / 20) + random.Random(f"{seed} {index}").gauss(0, 0.001)


main(step)
