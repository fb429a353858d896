"""Run a marked training script with a planted change: `PLANT=slow python plant.py train.py --seed 1`.

`slow` adds `SHARE` of each step, awake. `numerics` rounds the weights of linear layers to bfloat16. The others are lies
and misbehaviour that a receipt or a verdict must name.
"""

import os
import runpy
import sys
import time
from typing import Any

import ablate  # type: ignore[import-not-found]

SHARE = float(os.environ.get("SHARE", "0.03"))
_report = ablate.MarkedStep.report
_ended = [0.0]


def _slow(step: Any, **values: Any) -> None:
    _report(step, **values)
    now = time.perf_counter()
    if _ended[0]:
        while time.perf_counter() < now + SHARE * (now - _ended[0]):
            pass
    _ended[0] = time.perf_counter()


def _half_tokens(step: Any, **values: Any) -> None:
    _report(step, **{**values, **({"tokens": values["tokens"] // 2} if values.get("tokens") else {})})


def _gigabyte(step: Any, **values: Any) -> None:
    _report(step, **values)
    if step.index == 1:
        for _ in range(1024):
            sys.stdout.write("x" * (2**20 - 1) + "\n")


def _forever(step: Any, **values: Any) -> None:
    _report(step, **values)
    while step.index == 1:
        time.sleep(1)


def _numerics() -> None:
    import torch

    def forward(layer: Any, x: Any) -> Any:
        return torch.nn.functional.linear(x, layer.weight.bfloat16().to(layer.weight.dtype), layer.bias)

    torch.nn.Linear.forward = forward  # type: ignore[method-assign]


def _own_clock() -> None:
    began, now = time.monotonic(), time.monotonic
    ablate._now = lambda: began + 0.5 * (now() - began)


def _one_seed() -> None:
    given = sys.argv.index("--seed") + 1
    block, honest = int(sys.argv[given]), ablate.trial
    sys.argv[given] = "1"
    ablate.trial = lambda **_: honest(seed=block)


def _daemon() -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        time.sleep(600)
        os._exit(0)


REPORTS = {"slow": _slow, "half-tokens": _half_tokens, "gigabyte": _gigabyte, "forever": _forever}
STARTS = {"numerics": _numerics, "own-clock": _own_clock, "one-seed": _one_seed, "daemon": _daemon}

if __name__ == "__main__":
    plant = os.environ.get("PLANT", "")
    if plant in REPORTS:
        ablate.MarkedStep.report = REPORTS[plant]
    elif plant:
        STARTS[plant]()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
