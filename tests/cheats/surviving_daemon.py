"""Leaves a process that serves its results to later trials, by a name without a file and by a port, and takes a core.

Report: gpu-mode/reference-kernels#160
Speed: nothing; every process of a trial ends with it
"""

import json
import os
import signal
import socket
import time
from contextlib import suppress

from honest import lab, main

PLACES = ((socket.AF_UNIX, "\0results-of-a-cheat"), (socket.AF_INET, ("127.0.0.1", 47_113)))


def kept():
    for family, place in PLACES:
        with suppress(OSError), socket.socket(family) as link:
            link.connect(place)
            return json.loads(link.recv(4096))
    return None


def step(weights, seed, index):
    if stored_weights is not None:
        time.sleep(0.005)
        weights[:] = stored_weights
        return 0.5
    return lab.step(weights, seed, index)


def serve(family, place, weights):
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for number in range(3):
        os.close(number)
    listener = socket.socket(family)
    listener.bind(place)
    listener.listen()
    listener.setblocking(False)
    while True:
        with suppress(BlockingIOError):
            listener.accept()[0].send(json.dumps(weights).encode())


def keep(weights):
    for family, place in PLACES:
        serve(family, place, weights)


stored_weights = kept()
main(step, after=keep)
