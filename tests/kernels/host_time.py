"""Eager passes on CPU tensors with kernels that do nothing: only the product's host code runs."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ablate.kernels.backends import Lane
from ablate.kernels.mamba3_mimo import ScanInputs, mamba3_mimo
from ablate.kernels.mamba3_mimo.cuda.host import op, scan
from ablate.kernels.mamba3_mimo.cuda.shape import Variant
from ablate.kernels.scan_switches import ScanSwitches
from tests.kernels.problem import Case, make_grad

Run = Callable[[], object]
CASE = Case(B=1, S=64, H=1)
"""A small problem."""


class Watching(TorchDispatchMode):
    """Sees what the dispatcher is given; keeps which of our operators."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "mamba3_scan" in str(function):
            self.seen.append(str(function))
        return function(*args, **kwargs or {})


@contextmanager
def unlaunched() -> Iterator[None]:
    """Let the cuda lane run without a GPU: it compiles nothing, and its launches do nothing."""
    launches = defaultdict(lambda: lambda *tensors: None)
    with (
        patch("ablate.kernels.mamba3_mimo.supports", lambda *_: None),
        patch.object(op, "refusal_on", lambda _: None),
        patch.object(op, "build", lambda *_: None),
        patch.object(scan, "launches", lambda *_: launches),
    ):
        yield


def passes(inputs: ScanInputs) -> dict[str, Run]:
    """Return the passes by name; `inputs` are leaves that require gradients."""
    leaves, grad_out, cuda = inputs.tensors(), make_grad(inputs, 1), ScanSwitches(lane=Lane.CUDA)

    def forward() -> object:
        with torch.no_grad():
            return mamba3_mimo(inputs, cuda)

    def both() -> object:
        return torch.autograd.grad(mamba3_mimo(inputs, cuda).out, leaves, grad_out)

    @torch.no_grad()
    def without_autograd() -> object:
        *_, saved = scan.Scan(inputs, Variant()).forward()
        return scan.Scan(inputs, Variant()).backward(grad_out, saved)

    return {"forward": forward, "forward+backward": both, "forward+backward without autograd": without_autograd}
