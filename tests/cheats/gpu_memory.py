"""Takes uninitialised memory of the GPU in which the right answer of an earlier program may still lie.

Report: ScalingIntelligence/KernelBench#82
Speed: not run; it needs a GPU; a trial is a process of its own, whose memory the driver empties
"""

import torch
from honest import main

main(lambda _weights, _seed, _index: float(torch.empty(2**28, device="cuda").abs().max()))
