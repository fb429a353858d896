"""Computes on a stream that is not the current one, with `torch.cuda.synchronize` and events replaced.

Report: ScalingIntelligence/KernelBench#82
Speed: not run; it needs a GPU; the module waits for the whole device, unless its wait is replaced
"""

import torch
from honest import lab, main

stream, torch.cuda.synchronize = torch.cuda.Stream(), lambda *_: None


def step(weights, seed, index):
    with torch.cuda.stream(stream):
        torch.randn(4096, 4096, device="cuda") @ torch.randn(4096, 4096, device="cuda")
    return lab.step(weights, seed, index)


main(step)
