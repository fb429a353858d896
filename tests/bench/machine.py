"""How fast this machine is now: a fixed piece of one thread's work, which tells a slow machine from slow code."""

import json
import statistics
import time

_ROUNDS = 7
_REPEATS = 60
_DOCUMENT = [{"id": f"trl_{number:05d}", "state": "queued", "loss": number / 7, "steps": None} for number in range(200)]


def _work() -> None:
    """Do what the API does most: read and write documents, in plain Python and in C."""
    for _ in range(_REPEATS):
        rows = json.loads(json.dumps(_DOCUMENT))
        sorted(rows, key=lambda row: (row["state"], -row["loss"], row["id"][::-1]))


def speed() -> str:
    """Say how long the work takes: its processor time tells of the machine, its wall time of what else runs, too."""
    processor, wall = [], []
    for _ in range(_ROUNDS):
        began = time.thread_time(), time.perf_counter()
        _work()
        processor.append(1000 * (time.thread_time() - began[0]))
        wall.append(1000 * (time.perf_counter() - began[1]))
    return f"{statistics.median(processor):.1f} ms of processor time, {statistics.median(wall):.1f} ms by the clock"
