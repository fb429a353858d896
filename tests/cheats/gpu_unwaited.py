"""Computes on a stream that is not the current one, and replaces `torch.cuda.synchronize`.

Report: ScalingIntelligence/KernelBench#82
Needs: a GPU
Speed: kept; the wait is the program's own; 0.6 s of work behind the window hid in the 1 s by which starts vary
"""

import torch
from honest import main

stream, torch.cuda.synchronize = torch.cuda.Stream(), lambda *_: None


def step(_weights, _seed, index):
    with torch.cuda.stream(stream):
        torch.manual_seed(index)
        left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        for _ in range(20):
            _ = left @ left
    return 100.0 + index


main(step)
