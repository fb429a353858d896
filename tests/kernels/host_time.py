"""Host time of an eager pass without a GPU: the product's own way on CPU tensors, with kernels that do nothing.

Usage: python -m tests.kernels.host_time. Microseconds of this thread, the least of many batches: other processes do not
count. On a GPU, allocations and launches come on top: about 6 us each on the machine of the receipts.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

import kernels.mamba3_mimo
from kernels.backends import Lane
from kernels.mamba3_mimo import ScanInputs, mamba3_mimo
from kernels.mamba3_mimo.cuda.host import op, scan
from kernels.mamba3_mimo.cuda.shape import Variant
from kernels.mamba3_mimo.problem import Case, make_grad, make_inputs
from kernels.scan_switches import ScanSwitches

Run = Callable[[], object]
CASE = Case(B=1, S=64, H=1)
"""Small: what the tensors hold takes no time."""


@contextmanager
def unlaunched() -> Iterator[None]:
    """Let the cuda lane run here: nothing is compiled, and every launch does nothing."""
    launches = defaultdict(lambda: lambda *tensors: None)
    with (
        patch.object(kernels.mamba3_mimo, "supports", lambda *_: None),
        patch.object(op, "refusal_on", lambda _: None),
        patch.object(op, "build", lambda *_: None),
        patch.object(scan, "launches", lambda *_: launches),
    ):
        yield


def passes(inputs: ScanInputs) -> dict[str, Run]:
    """Return what is timed, by name; `inputs` are leaves that want gradients."""
    leaves, grad_out, cuda = inputs.tensors(), make_grad(inputs, 1), ScanSwitches(lane=Lane.CUDA)

    def forward() -> object:
        with torch.no_grad():
            return mamba3_mimo(inputs, cuda)

    def both() -> object:
        return torch.autograd.grad(mamba3_mimo(inputs, cuda).out, leaves, grad_out)

    @torch.no_grad()
    def without_autograd() -> object:
        made = scan.Scan(inputs, Variant())
        *_, saved = made.forward()
        again = scan.Scan(inputs, Variant())
        return again.backward(grad_out, saved)

    return {"forward": forward, "forward+backward": both, "forward+backward without autograd": without_autograd}


def host_us(run: Run, *, batches: int = 60, repeats: int = 5) -> float:
    """Return the least mean time of a batch of runs, by this thread's clock."""
    found = []
    for _ in range(batches + 4):
        begin = time.thread_time()
        for _ in range(repeats):
            run()
        found.append(1e6 * (time.thread_time() - begin) / repeats)
    return min(found[4:])


def measured() -> dict[str, float]:
    """Return the host time of every pass in microseconds."""
    inputs = make_inputs(CASE, "cpu")
    inputs = inputs.with_tensors(tuple(t.requires_grad_() for t in inputs.tensors()))
    with unlaunched():
        return {name: host_us(run) for name, run in passes(inputs).items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, us in measured().items():
        sys.stdout.write(f"{name:<36}{us:6.0f} us\n")
