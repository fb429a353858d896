"""Takes more memory than the rule allows, half of it in another process.

Report: none; found here
Memory: kept; on a processor the peak is that of the largest process
"""

import os
import time

from honest import main

reader, writer = os.pipe()
if os.fork() == 0:
    os.close(writer)
    ballast = bytearray(b"x") * (200 << 20)
    os.read(reader, 1)
    os._exit(0)
ballast = bytearray(b"x") * (200 << 20)


def step(_weights, _seed, _index):
    time.sleep(0.005)
    return 0.5


main(step)
