"""Mamba-3 MIMO scan: a rank-R state space recurrence with trapezoidal input, rotary keys and gated output.

Public: `mamba3_mimo(ScanInputs(...), ScanSwitches(...))`, `ScanResult`, `supports`; for decoding `decode_state` and
`decode_step`. Under torch.compile the cuda lane is an operator of the graph; the reference lane is a graph break. The
facts of a scan are recorded by the code that runs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backends import Lane
from kernels.errors import KernelUnsupported
from kernels.mamba3_mimo.inputs import DIFFERENTIABLE, ScanInputs
from kernels.mamba3_mimo.step import DecodeState, decode_state, decode_step
from kernels.mamba3_mimo.support import LANES, run_cuda, supports
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

    Records the facts of `ScanFact` when it runs, the cuda lane also what its binaries contain (see op.py). Raises
    KernelUnsupported, with the reason, when the lane cannot run this combination; nothing is ever replaced silently.
    """
    if switches.lane is Lane.CUDA and torch.compiler.is_compiling():
        return ScanResult(*run_cuda(inputs, switches))  # an operator of the graph, which refuses when it runs
    return ScanResult(*_eager(inputs, switches))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _eager(inputs: ScanInputs, switches: ScanSwitches) -> tuple[Tensor, Tensor]:
    refusal = supports(switches, inputs.v.device.type)
    if refusal is not None:
        raise KernelUnsupported(refusal)
    return LANES[switches.lane].run(inputs, switches)
