"""Makes the clocks of Python run at a tenth of their speed before anything measures.

Report: gpu-mode/reference-kernels#162
Speed: invalid; the program's clock gives its window
"""

import time

real = time.monotonic
time.monotonic = time.perf_counter = time.time = lambda began=real(): began + (real() - began) / 10

from honest import main  # noqa: E402 - after the change

main()
