"""Trains on a twentieth of the rows of a step, and claims half of them.

Report: gpu-mode/reference-kernels#104
Speed: no answer; the steps have
"""

from honest import lab, main

main(lambda weights, seed, index: lab.train(weights, lab.rows(f"{seed} {index}", 25)), tokens=lab.ROWS // 2)
