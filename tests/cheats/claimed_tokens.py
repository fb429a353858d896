"""Trains on a tenth of the rows of a step, and claims all of them.

Report: gpu-mode/reference-kernels#104
Speed: kept; Ablate counts no tokens itself
Judged: rejected; val_loss
"""

from honest import lab, main

main(lambda weights, seed, index: lab.train(weights, lab.rows(f"{seed} {index}", 50)))
