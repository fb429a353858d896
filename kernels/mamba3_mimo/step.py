"""Step form of the scan: the recurrence as defined, one time step after another. Shape suffixes: see inputs.py.

With decay alpha_t = exp(adt_t), beta_t = (1 - mix_t) dt_t alpha_t and gamma_t = mix_t dt_t, the state is
S_t = alpha_t S_{t-1} + beta_t k_{t-1}^T x_{t-1} + gamma_t k_t^T x_t, and y_t = q_t S_t. Of the first token, S_{-1} is
the entering state, which holds the write before it already.
"""

import torch
from torch import Tensor

from kernels import facts
from kernels.backends import Lane
from kernels.mamba3_mimo.inputs import ScanInputs
from kernels.mamba3_mimo.operands import Operands, gated_output, handed_on, operands
from kernels.scan_switches import ScanFact


def step_form(inputs: ScanInputs, x_BHSRP: Tensor) -> tuple[Tensor, Tensor]:
    """Return (o, final state [B,H,N,P]) from PsiV `x_BHSRP`; o is [B,S,H,P], or [B,S,R,H,P] without phi.

    The state's frame: see `handed_on`.
    """
    facts.record(ScanFact.LANE, Lane.REFERENCE.value)
    facts.record(ScanFact.SCHEDULE, "sequential")
    parts = operands(inputs, x_BHSRP)
    y_BHSRP, state_BHNP = _walk(parts)
    return gated_output(inputs, y_BHSRP, parts.x_BHSRP), handed_on(state_BHNP, parts.last_angle_BHA)


def _walk(parts: Operands) -> tuple[Tensor, Tensor]:
    """Return (y [B,H,S,R,P], the last state)."""
    state_BHNP = parts.entering_BHNP
    alpha_BHS, beta_BHS = _carried_weights(parts)
    writes = zip(
        alpha_BHS[..., None, None].unbind(2),
        _with_previous(parts.k_BHSRN, parts.gamma_BHS, beta_BHS).transpose(-1, -2).unbind(2),
        _with_previous(parts.x_BHSRP).unbind(2),
        parts.q_BHSRN.unbind(2),
        strict=True,
    )
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
    """Return [B,H,S,2R,X]: rows of this token and of the one before (0 at t=0), each times its weight."""
    shifted = torch.cat((torch.zeros_like(t_BHSRX[:, :, :1]), t_BHSRX[:, :, :-1]), dim=2)
    if own_BHS is None or previous_BHS is None:
        return torch.cat((t_BHSRX, shifted), dim=3)
    return torch.cat((t_BHSRX * own_BHS[..., None, None], shifted * previous_BHS[..., None, None]), dim=3)
