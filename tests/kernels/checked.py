"""Compare the kernels of the cuda lane, launched directly, with the float64 reference lane."""

from torch import Tensor

from ablate.kernels.mamba3_mimo.cuda.host.final_state import RowEnd
from ablate.kernels.mamba3_mimo.cuda.host.scan import Scan
from ablate.kernels.mamba3_mimo.cuda.shape import Variant
from ablate.kernels.mamba3_mimo.inputs import ScanInputs
from tests.kernels import criterion
from tests.kernels.accuracy import make_final_grad, poisoned_buffers
from tests.kernels.problem import Case, make_grad, make_inputs


def ours(inputs: ScanInputs, grad_out: Tensor, variant: Variant, grad_state: Tensor | None = None) -> dict[str, Tensor]:
    """Return output, final state and gradients of the cuda lane."""
    scan = Scan(inputs, variant)
    out, state, saved = scan.forward(return_final_state=True)
    row_end = None if state is None or grad_state is None else RowEnd(state, grad_state)
    results = {"out": out} if state is None else {"out": out, "state": state}
    return results | scan.backward(grad_out, saved, row_end)


def wrong(case: Case, variant: Variant | None = None) -> dict[str, criterion.Share]:
    """Return the wrong results of a case with their shares, see docs/kernels-correctness.md."""
    inputs = make_inputs(case)
    grad_out, grad_state = make_grad(inputs, case.seed + 1), make_final_grad(case)
    with poisoned_buffers():
        got = ours(inputs, grad_out, variant or Variant(), grad_state)
    return criterion.wrong(got, inputs, grad_out, grad_state)
