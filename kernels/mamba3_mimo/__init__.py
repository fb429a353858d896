"""Mamba-3 MIMO scan: a rank-R state space recurrence with trapezoidal input, rotary keys and gated output.

Public: `mamba3_mimo(ScanInputs(...), ScanSwitches(...))`, `ScanResult`, `supports`; for decoding `decode_state` and
`decode_step`. Under torch.compile the cuda lane is an operator of the graph; the reference lane is a graph break. The
facts of a scan are recorded by the code that runs.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backends import Lane
from kernels.errors import KernelUnsupported
from kernels.mamba3_mimo.inputs import DIFFERENTIABLE, ScanInputs
from kernels.mamba3_mimo.peer import peer_scan
from kernels.mamba3_mimo.recompute import Form, scan
from kernels.mamba3_mimo.reference import chunk_parallel
from kernels.mamba3_mimo.step import DecodeState, decode_state, decode_step, step_form
from kernels.mamba3_mimo.support import supports
from kernels.scan import ScanSwitches

__all__ = [
    "DIFFERENTIABLE",
    "DecodeState",
    "ScanInputs",
    "ScanResult",
    "decode_state",
    "decode_step",
    "mamba3_mimo",
    "supports",
]


class ScanResult(NamedTuple):
    """Output of one scan."""

    out: Tensor
    """o [B,S,H,P], or [B,S,R,H,P] without phi; dtype of v."""
    final_state: Tensor
    """S after the last token [B,H,N,P], float32, without gradient; `decode_state` adds what decoding needs."""


_DEFAULTS = ScanSwitches()


def mamba3_mimo(inputs: ScanInputs, switches: ScanSwitches = _DEFAULTS) -> ScanResult:
    """Run the scan and return its output and final state.

    Records the facts of `ScanFact` when it runs, the cuda lane also what its binaries contain (see cuda/op.py). Raises
    KernelUnsupported, with the reason, when the lane cannot run this combination; nothing is ever replaced silently.
    """
    if switches.lane is Lane.CUDA and torch.compiler.is_compiling():
        return ScanResult(*_cuda(inputs, switches))  # an operator of the graph, which refuses when it runs
    return ScanResult(*_eager(inputs, switches))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _eager(inputs: ScanInputs, switches: ScanSwitches) -> tuple[Tensor, Tensor]:
    refusal = supports(switches, inputs.v.device.type)
    if refusal is not None:
        raise KernelUnsupported(refusal)
    return _LANES[switches.lane](inputs, switches)


def _reference(inputs: ScanInputs, switches: ScanSwitches) -> tuple[Tensor, Tensor]:
    sequential = switches.schedule == "sequential"
    form: Form = step_form if sequential else partial(chunk_parallel, chunk_size=switches.chunk_size)
    return scan(inputs, form, psiv_cache=switches.psiv_cache)


def _cuda(inputs: ScanInputs, switches: ScanSwitches) -> tuple[Tensor, Tensor]:
    from kernels.mamba3_mimo.cuda import op  # tilelang is imported on first use: a CPU node has none

    return op.scan(inputs, switches)


def _peer(inputs: ScanInputs, switches: ScanSwitches) -> tuple[Tensor, Tensor]:
    return peer_scan(inputs, chunk_size=switches.chunk_size)


_LANES: dict[Lane, Callable[[ScanInputs, ScanSwitches], tuple[Tensor, Tensor]]] = {
    Lane.REFERENCE: _reference,
    Lane.CUDA: _cuda,
    Lane.PEER: _peer,
}
"""Implementation of every lane that has one."""
