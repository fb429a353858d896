"""Compare the kernels of the cuda lane, launched directly, with the float64 reference lane."""

from torch import Tensor

from kernels.mamba3_mimo.accuracy import (
    Case,
    Errors,
    compare,
    make_final_grad,
    make_grad,
    make_inputs,
    over_limits,
    poisoned_buffers,
)
from kernels.mamba3_mimo.cuda.host.beyond import beyond_of
from kernels.mamba3_mimo.cuda.host.scan import Scan
from kernels.mamba3_mimo.cuda.host.variant import Variant
from kernels.mamba3_mimo.exact import reference
from kernels.mamba3_mimo.inputs import ScanInputs


def ours(inputs: ScanInputs, grad_out: Tensor, variant: Variant, grad_state: Tensor | None = None) -> dict[str, Tensor]:
    """Return output, final state and gradients of the cuda lane."""
    scan = Scan(inputs, variant)
    out, state, saved = scan.forward(return_final_state=True)
    told = {"out": out} if state is None else {"out": out, "state": state}
    return told | scan.backward(grad_out, saved, beyond_of(state, grad_state))


def check(case: Case, variant: Variant | None = None) -> tuple[Errors, list[str]]:
    """Return the errors of every output and the names of those over the limits (NaN counts as over)."""
    inputs = make_inputs(case)
    grad_out, grad_state = make_grad(inputs, case.seed + 1), make_final_grad(case)
    with poisoned_buffers():
        got = ours(inputs, grad_out, variant or Variant(), grad_state)
    errors = compare(got, reference(inputs, grad_out, grad_state))
    return errors, over_limits(errors)
