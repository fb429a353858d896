"""Mamba-3 MIMO scan: a rank-R state space recurrence with trapezoidal input, rotary keys and gated output.

Public: `mamba3_mimo(ScanInputs(...), ScanSwitches(...))`, `ScanResult`, `ScanState`, `supports`. A row can be cut in
pieces, and a sequence decoded token by token: each scan goes on from the state that the one before returns. Under
torch.compile the cuda lane is an operator of the graph; the reference lane is a graph break. The facts of a scan are
recorded by the code that runs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backends import Lane
from kernels.errors import KernelUnsupported
from kernels.mamba3_mimo.inputs import DIFFERENTIABLE, ScanInputs
from kernels.mamba3_mimo.state import ScanState, entered, left_behind
from kernels.mamba3_mimo.support import LANES, run_cuda, supports
from kernels.scan_switches import ScanSwitches

__all__ = [
    "DIFFERENTIABLE",
    "ScanInputs",
    "ScanResult",
    "ScanState",
    "mamba3_mimo",
    "supports",
]


class ScanResult(NamedTuple):
    """Output of one scan."""

    out: Tensor
    """o [B,S,H,P], or [B,S,R,H,P] without phi; dtype of v."""
    final_state: ScanState | None
    """What the rows leave behind for the scan that goes on with them; None unless it was asked for."""


_DEFAULTS = ScanSwitches()


def mamba3_mimo(
    inputs: ScanInputs,
    switches: ScanSwitches = _DEFAULTS,
    *,
    initial_state: ScanState | None = None,
    return_final_state: bool = False,
) -> ScanResult:
    """Run the scan and return its output, and what it leaves behind when asked for.

    Rows go on from `initial_state` instead of nothing; where a row's first token belongs to another document than the
    state, it begins with nothing, and that state gets a gradient of zero. Gradients flow into `initial_state` and from
    `final_state`, so that pieces of a row, each scanned from the final state of the one before, give the outputs and
    gradients of the whole row. Lane peer has neither: it refuses an initial state, and the gradient of a final one.

    Records the facts of `ScanFact` when it runs, the cuda lane also what its binaries contain (see cuda/host/op.py).
    Raises KernelUnsupported, with the reason, when the lane cannot run this combination, and ShapeError when the state
    does not fit; nothing is ever replaced silently.
    """
    if initial_state is not None:
        inputs = entered(inputs, initial_state)
    in_graph = switches.lane is Lane.CUDA and torch.compiler.is_compiling()  # the operator refuses when it runs
    out, state_BHNP = (run_cuda if in_graph else _eager)(inputs, switches, return_final_state)
    return ScanResult(out, None if state_BHNP is None else left_behind(inputs, state_BHNP))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _eager(inputs: ScanInputs, switches: ScanSwitches, return_final_state: bool) -> tuple[Tensor, Tensor | None]:
    refusal = supports(switches, inputs.v.device.type)
    if refusal is not None:
        raise KernelUnsupported(refusal)
    return LANES[switches.lane].run(inputs, switches, return_final_state)
