"""Step form of the scan: the recurrence as defined, one time step after another. Shape suffixes: see inputs.py.

With decay alpha_t = exp(adt_t), beta_t = (1 - mix_t) dt_t alpha_t and gamma_t = mix_t dt_t, the state is
S_t = alpha_t S_{t-1} + beta_t k_{t-1}^T x_{t-1} + gamma_t k_t^T x_t, and y_t = q_t S_t.
"""

import torch
from torch import Tensor

from kernels import facts
from kernels.mamba3_mimo.inputs import ScanInputs
from kernels.mamba3_mimo.operands import Operands, gated_output, operands


def step_form(inputs: ScanInputs, x_BHSRP: Tensor) -> tuple[Tensor, Tensor]:
    """Return (o [B,S,H,P], final state [B,H,N,P]) from PsiV `x_BHSRP`."""
    facts.record("mamba3_mimo.lane", "reference")
    facts.record("mamba3_mimo.schedule", "sequential")
    parts = operands(inputs, x_BHSRP)
    y_BHSRP, state_BHNP = _walk(parts)
    return gated_output(inputs, y_BHSRP, parts.x_BHSRP), state_BHNP


def _walk(parts: Operands) -> tuple[Tensor, Tensor]:
    alpha_BHS, beta_BHS = _carried_weights(parts)
    writes = zip(
        alpha_BHS[..., None, None].unbind(2),
        _with_previous(parts.k_BHSRN, parts.gamma_BHS, beta_BHS).transpose(-1, -2).unbind(2),
        _with_previous(parts.x_BHSRP).unbind(2),
        parts.q_BHSRN.unbind(2),
        strict=True,
    )
    batch, heads, _, _, state_size = parts.k_BHSRN.shape
    state_BHNP = parts.x_BHSRP.new_zeros(batch, heads, state_size, parts.x_BHSRP.shape[-1])
    reads = []
    for alpha, k, x, q in writes:
        state_BHNP = alpha * state_BHNP + k @ x
        reads.append(q @ state_BHNP)
    return torch.stack(reads, dim=2), state_BHNP


def _carried_weights(parts: Operands) -> tuple[Tensor, Tensor]:
    """Return (alpha, beta), both zero where a document starts, because nothing is carried into it."""
    alpha_BHS = parts.adt_BHS.exp()
    if parts.starts_BS is not None:
        alpha_BHS = alpha_BHS.masked_fill(parts.starts_BS.unsqueeze(1), 0)
    return alpha_BHS, parts.look_BHS * alpha_BHS


def _with_previous(t_BHSRX: Tensor, own_BHS: Tensor | None = None, previous_BHS: Tensor | None = None) -> Tensor:
    """Return [B,H,S,2R,X]: rows of this token and of the one before (zero at t=0), each times its weight."""
    shifted = torch.cat((torch.zeros_like(t_BHSRX[:, :, :1]), t_BHSRX[:, :, :-1]), dim=2)
    if own_BHS is None or previous_BHS is None:
        return torch.cat((t_BHSRX, shifted), dim=3)
    return torch.cat((t_BHSRX * own_BHS[..., None, None], shifted * previous_BHS[..., None, None]), dim=3)
