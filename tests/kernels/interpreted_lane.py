"""The CUDA lane on a CPU: the product's own way from `mamba3_mimo` on, with interpreted kernels that round."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

from torch import Tensor

from ablate.kernels import facts, mamba3_mimo
from ablate.kernels.mamba3_mimo import support
from ablate.kernels.mamba3_mimo.cuda.host import op, scan
from ablate.kernels.mamba3_mimo.cuda.host.compiled import program
from ablate.kernels.scan_switches import ScanFact, ScanSwitches
from tests.kernels import tile_rounding


@contextmanager
def interpreted_lane() -> Iterator[None]:
    """Let the lane take tensors of the CPU inside the block."""
    with (
        mock.patch.object(mamba3_mimo, "supports", _supports),
        mock.patch.object(op, "refusal_on", return_value=None),
        mock.patch.object(op, "build", _build),
        mock.patch.object(scan, "launches", lambda *problem: _Interpreted(*problem)),
    ):
        yield


class _Interpreted:
    """What launches the kernels of one problem, by interpreting their programs."""

    def __init__(self, *problem: Any) -> None:
        self._problem = problem

    def __getitem__(self, name: str) -> Callable[..., object]:
        return partial(_launched, program(name, *self._problem))


def _launched(text: Any, *arguments: Tensor | int) -> None:
    """Run a program as a kernel runs: what it writes to, autograd does not hear of. The interpreter writes to all."""
    tile_rounding.run(text, *(given.data if isinstance(given, Tensor) else given for given in arguments))


def _build(*_key: object) -> None:
    facts.add(ScanFact.KERNELS_COMPILED, 1)


def _supports(asked: ScanSwitches, _device: str) -> str | None:
    return support.supports(asked, "cuda")
