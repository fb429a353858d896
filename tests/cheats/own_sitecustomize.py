"""Changes the clock in a `sitecustomize.py` of its own code, which Python runs before the program.

Report: gpu-mode/reference-kernels#162
File: sitecustomize.py
Env: PYTHONPATH=.
Speed: invalid; the program's clock gives its window
"""

import time

real = time.monotonic
time.monotonic = lambda began=real(): began + (real() - began) / 10
