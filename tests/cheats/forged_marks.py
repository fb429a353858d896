"""Sends the marks of a whole loop over the worker's socket by itself, and trains before them.

Report: gpu-mode/pygpubench#23
Speed: named; slower outside of it
"""

import json
import os
import socket
import sys
import time

import lab

seed, weights = int(sys.argv[1]), [0.0] * lab.WIDTH
settings = json.loads(os.environ["ABLATE_TRIAL"])
before, total = 1 + settings["warmup"], 1 + settings["warmup"] + settings["timed"]
losses = [lab.step(weights, seed, index) for index in range(total)]
lab.save(weights)
link = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
link.connect(settings["socket"])


def send(event, **values):
    link.send(json.dumps({"event": event, "rank": 0, **values}).encode())


ends = []
send("began", at=time.monotonic(), python="3", implementation="none", world=1)
for index in range(total):
    if index == before:
        send("window began", at=time.monotonic())
    time.sleep(0.005)
    ends.append(time.monotonic())
send("window ended", at=ends[-1])
send("steps", steps=[[index, end, lab.ROWS, losses[index]] for index, end in enumerate(ends)])
send("reported", values={"val_loss": lab.loss_of(weights, lab.rows("validation"))})
send("ended", at=time.monotonic(), seed=seed, whole=True, memory=None, packages={})
