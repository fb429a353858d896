"""Makes the wait for the device do nothing, here that of a stand-in for torch whose stream is a thread.

Report: ScalingIntelligence/KernelBench#82
Speed: named; slower outside of it
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from honest import lab, main

stream = ThreadPoolExecutor(1)
cuda = SimpleNamespace(
    is_available=lambda: True,
    is_initialized=lambda: True,
    device_count=lambda: 1,
    current_device=lambda: 0,
    synchronize=lambda _device=0: None,
    max_memory_allocated=lambda _device: 0,
    max_memory_reserved=lambda _device: 0,
)
sys.modules["torch"] = SimpleNamespace(cuda=cuda, _C=SimpleNamespace(), distributed=None)


def step(weights, seed, index):
    stream.submit(lab.step, weights, seed, index)
    time.sleep(0.005)
    return 1.0


main(step, after=lambda _weights: stream.shutdown())
