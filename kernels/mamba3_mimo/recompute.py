"""Reference scan as one autograd node that saves its inputs, and PsiV with `psiv_cache`.

The backward pass recomputes all other values. So `psiv_cache` only decides whether PsiV (R times the size of v) stays
in memory between the passes. Both settings run the same arithmetic on the same numbers, so their outputs and gradients
are bit-identical.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ablate.kernels import facts
from ablate.kernels.mamba3_mimo.inputs import ScanInputs
from ablate.kernels.mamba3_mimo.operands import psiv
from ablate.kernels.scan_switches import ScanFact

Form: TypeAlias = Callable[[ScanInputs, Tensor], tuple[Tensor, Tensor]]
"""Step or chunk-parallel form: (inputs, PsiV) -> (o, final state)."""


@dataclass(frozen=True, kw_only=True)
class _Call:
    """Arguments to repeat the forward pass."""

    form: Form
    inputs: ScanInputs
    """Read for `segment_ids` and `angles_cumulated`; the saved tensors replace its tensors."""
    psiv_cache: bool


def scan(inputs: ScanInputs, form: Form, *, psiv_cache: bool) -> tuple[Tensor, Tensor]:
    """Return (o, final state [B,H,N,P])."""
    tensors = inputs.tensors()
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        detached = inputs.with_tensors(tuple(tensor.detach() for tensor in tensors))
        call = _Call(form=form, inputs=detached, psiv_cache=psiv_cache)
        out, state = _Scan.apply(call, *tensors)  # type: ignore[no-untyped-call]
        return out, state
    return form(inputs, psiv(inputs.v, inputs.psi))


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        inputs = call.inputs.with_tensors(tensors)
        x_BHSRP = psiv(inputs.v, inputs.psi)
        out, state = call.form(inputs, x_BHSRP)
        ctx.call = call
        ctx.save_for_backward(*tensors, *([x_BHSRP] if call.psiv_cache else []))
        if call.psiv_cache:
            facts.add(ScanFact.PSIV_SAVED_BYTES, x_BHSRP.nbytes)
        ctx.set_materialize_grads(False)
        return out, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        tensors = saved[: len(ctx.call.inputs.names)]
        if ctx.call.psiv_cache:
            x_BHSRP = saved[-1]
        else:
            inputs = ctx.call.inputs.with_tensors(tensors)
            x_BHSRP = psiv(inputs.v, inputs.psi)
            facts.add(ScanFact.PSIV_RECOMPUTES, 1)
        needed = ctx.needs_input_grad[1:]
        return None, *_gradients(ctx.call, tensors, x_BHSRP, grads, needed)


def _gradients(
    call: _Call,
    tensors: tuple[Tensor, ...],
    x_BHSRP: Tensor,
    grads_of_results: tuple[Tensor | None, ...],
    needed: tuple[bool, ...],
) -> list[Tensor | None]:
    """Repeat the form with PsiV as a leaf; return one gradient per tensor, None if not `needed`.

    `grads_of_results` are the gradients of o and of the final state, None for an unused result.
    """
    leaves = tuple(t.detach().requires_grad_(need) for t, need in zip(tensors, needed, strict=True))
    x_BHSRP = x_BHSRP.detach().requires_grad_()
    with torch.enable_grad():
        results = call.form(call.inputs.with_tensors(leaves), x_BHSRP)
    used = [(result, grad) for result, grad in zip(results, grads_of_results, strict=True) if grad is not None]
    at_v, at_psi = call.inputs.names.index("v"), call.inputs.names.index("psi")
    through = [i for i, need in enumerate(needed) if need and i not in (at_v, at_psi)]
    *grads, grad_x_BHSRP = torch.autograd.grad(
        [result for result, _ in used],
        [*(leaves[i] for i in through), x_BHSRP],
        [grad for _, grad in used],
        allow_unused=True,  # the final state does not depend on q and z
        materialize_grads=True,
    )
    result: list[Tensor | None] = [None] * len(tensors)
    for i, grad in zip(through, grads, strict=True):
        result[i] = grad
    if needed[at_v] or needed[at_psi]:
        result[at_v], result[at_psi] = _psiv_gradients(tensors[at_v], tensors[at_psi], grad_x_BHSRP)
    return result


def _psiv_gradients(v_BSHP: Tensor, psi_HRP: Tensor, grad_x_BHSRP: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of v and psi from the gradient of PsiV."""
    acc = torch.promote_types(v_BSHP.dtype, torch.float32)
    grad_x_BHSRP = grad_x_BHSRP.to(acc)
    grad_v = torch.einsum("bhsrp,hrp->bshp", grad_x_BHSRP, psi_HRP.to(acc)).to(v_BSHP.dtype)
    grad_psi = torch.einsum("bhsrp,bshp->hrp", grad_x_BHSRP, v_BSHP.to(acc)).to(psi_HRP.dtype)
    return grad_v, grad_psi
