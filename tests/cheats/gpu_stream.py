"""Computes on a stream that is not the current one.

Report: ScalingIntelligence/KernelBench#82
Needs: a GPU
Speed: nothing; the module waits for the whole device
"""

import torch
from honest import main

stream = torch.cuda.Stream()


def step(_weights, _seed, index):
    with torch.cuda.stream(stream):
        torch.manual_seed(index)
        left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        for _ in range(20):
            _ = left @ left
    return 100.0 + index


main(step)
