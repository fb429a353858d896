"""Mamba-3 MIMO scan: a rank-R state space recurrence with trapezoidal input, rotary keys and an output gate.

Public: `mamba3_mimo(ScanInputs(...), ScanSwitches(...))`, `ScanResult`, `ScanState`, `supports`. A scan can start from
the state that an earlier scan returned, so rows can be cut into pieces and sequences decoded token by token. Under
torch.compile lane cuda is an operator of the graph, and the reference lane is a graph break.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ablate.kernels.backends import Lane
from ablate.kernels.errors import KernelUnsupported
from ablate.kernels.mamba3_mimo.inputs import DIFFERENTIABLE, ScanInputs
from ablate.kernels.mamba3_mimo.state import ScanState, entered, left_behind
from ablate.kernels.mamba3_mimo.support import LANES, run_cuda, supports
from ablate.kernels.scan_switches import ScanSwitches

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
    """State for a scan that continues the rows. None unless requested."""


_DEFAULTS = ScanSwitches()


def mamba3_mimo(
    inputs: ScanInputs,
    switches: ScanSwitches = _DEFAULTS,
    *,
    initial_state: ScanState | None = None,
    return_final_state: bool = False,
) -> ScanResult:
    """Run the scan and return its output, and with `return_final_state` its final state.

    Rows continue from `initial_state`. If a row's first token belongs to another document than the state, the row
    starts from zero and the state gets a zero gradient. Gradients flow into `initial_state` and from `final_state`, so
    a row scanned in pieces has the outputs and gradients of the whole row. Lane peer refuses an initial state and a
    gradient of the final state.

    The code that runs records the facts of `ScanFact`. Lane cuda also records the contents of its binaries, see
    cuda/host/op.py.

    Raises:
        KernelUnsupported: the lane cannot run this combination; the message gives the reason.
        ShapeError: the initial state does not fit the inputs.

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
