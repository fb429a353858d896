"""Compare the kernels of the cuda lane, launched directly, with the float64 reference lane."""

from torch import Tensor

from kernels.mamba3_mimo import criterion
from kernels.mamba3_mimo.accuracy import Case, make_final_grad, make_grad, make_inputs, poisoned_buffers
from kernels.mamba3_mimo.cuda.host.final_state import beyond_of
from kernels.mamba3_mimo.cuda.host.scan import Scan
from kernels.mamba3_mimo.cuda.shape import Variant
from kernels.mamba3_mimo.inputs import ScanInputs


def ours(inputs: ScanInputs, grad_out: Tensor, variant: Variant, grad_state: Tensor | None = None) -> dict[str, Tensor]:
    """Return output, final state and gradients of the cuda lane."""
    scan = Scan(inputs, variant)
    out, state, saved = scan.forward(return_final_state=True)
    told = {"out": out} if state is None else {"out": out, "state": state}
    return told | scan.backward(grad_out, saved, beyond_of(state, grad_state))


def wrong(case: Case, variant: Variant | None = None) -> dict[str, criterion.Share]:
    """Return the results of a case that are not right (docs/kernels-correctness.md), with their errors."""
    inputs = make_inputs(case)
    grad_out, grad_state = make_grad(inputs, case.seed + 1), make_final_grad(case)
    with poisoned_buffers():
        got = ours(inputs, grad_out, variant or Variant(), grad_state)
    return criterion.wrong(got, inputs, grad_out, grad_state)
