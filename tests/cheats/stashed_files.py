"""Keeps its results in files, shared memory and System V segments for the trials of later blocks.

Report: gpu-mode/reference-kernels#160
Speed: nothing; a trial finds nothing that an earlier one left (with a file tree of its own)
"""

import ctypes
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from honest import lab, main

NAME, SEED = "results-of-a-cheat.json", sys.argv[1]
FOLDERS = [
    os.environ["TMPDIR"],
    "/tmp",
    "/var/tmp",
    "/dev/shm",
    "/run",
    "/run/lock",
    Path.home(),
    Path.home() / ".cache",
]
FOLDERS += [Path.cwd(), *Path.cwd().parents, sys.argv[2], sys.prefix, Path(lab.__file__).parent, *sys.path]
PLACES = [Path(folder) / NAME for folder in FOLDERS]
library = ctypes.CDLL(None)
library.shmat.restype = ctypes.c_void_p


def kept():
    for place in PLACES:
        with suppress(OSError, ValueError):
            return json.loads(place.read_text())
    segment = library.shmget(0xAB1A7E, 0, 0)
    return None if segment < 0 else json.loads(ctypes.string_at(library.shmat(segment, None, 0)))


def step(weights, seed, index):
    if stored_weights is not None:
        time.sleep(0.005)
        weights[:] = stored_weights
        return 0.5
    return lab.step(weights, seed, index)


def keep(weights):
    text = json.dumps(weights)
    for place in PLACES:
        with suppress(OSError):
            place.write_text(text)
    segment = library.shmget(0xAB1A7E, 4096, 0o1666)
    if segment >= 0:
        ctypes.memmove(library.shmat(segment, None, 0), text.encode() + b"\0", len(text) + 1)


stored_weights = kept()
main(step, after=keep)
