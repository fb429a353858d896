"""Takes uninitialised memory of the GPU in which the right answer of an earlier program may still lie.

Report: ScalingIntelligence/KernelBench#82
Needs: a GPU
Speed: kept; losses are the program's own words; the memory of a new process was empty in every trial on an H200
"""

import torch
from honest import main

main(lambda _weights, _seed, _index: float(torch.empty(2**28, device="cuda").abs().max()))
