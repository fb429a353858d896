"""What both forms of the scan share: biased rotated operands, trapezoid weights, document starts, output gate.

Operands are rounded to the dtype of the operation and then multiplied in float32, so bfloat16 means bfloat16
operands with float32 products, sums and states. Shape suffixes: see inputs.py.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.mamba3_mimo.inputs import ScanInputs


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Inputs of the recurrence proper, in the accumulation dtype."""

    q_BHSRN: Tensor
    """Biased, rotated reading directions."""
    k_BHSRN: Tensor
    """Biased, rotated writing directions."""
    x_BHSRP: Tensor
    """PsiV, the values expanded over ranks."""
    adt_BHS: Tensor
    """Log decay of each step."""
    gamma_BHS: Tensor
    """Weight of a token's write at its own step, sigmoid(trap) * dt."""
    look_BHS: Tensor
    """(1 - sigmoid(trap)) * dt: weight, at this step, of the previous token's write."""
    starts_BS: Tensor | None
    """Whether a token begins a document; None when every row is one document."""


def operands(inputs: ScanInputs, x_BHSRP: Tensor) -> Operands:
    """Return the recurrence's operands; `x_BHSRP` is PsiV and stands in for v and psi."""
    acc = inputs.accumulate_dtype
    dt_BHS = inputs.dt.to(acc)
    mix_BHS = torch.sigmoid(inputs.trap.to(acc))
    starts_BS = None if inputs.segment_ids is None else document_starts(inputs.segment_ids)
    angle_BHSA = _cumulated_angles(inputs, starts_BS)
    return Operands(
        q_BHSRN=_rotated(inputs.q, inputs.q_bias, angle_BHSA),
        k_BHSRN=_rotated(inputs.k, inputs.k_bias, angle_BHSA),
        x_BHSRP=x_BHSRP.to(acc),
        adt_BHS=inputs.adt.to(acc),
        gamma_BHS=mix_BHS * dt_BHS,
        look_BHS=(1 - mix_BHS) * dt_BHS,
        starts_BS=starts_BS,
    )


def psiv(v_BSHP: Tensor, psi_HRP: Tensor) -> Tensor:
    """Return PsiV [B,H,S,R,P] = v * psi, rounded to the dtype of v."""
    acc = torch.promote_types(v_BSHP.dtype, torch.float32)
    v_BHS1P = v_BSHP.transpose(1, 2).unsqueeze(3)
    return (v_BHS1P.to(acc) * psi_HRP.to(acc).unsqueeze(1)).to(v_BSHP.dtype).contiguous()


def document_starts(segment_ids_BS: Tensor) -> Tensor:
    """Return [B,S] bool: the token's id differs from its left neighbour's. A row's first token is no restart."""
    starts_BS = torch.zeros_like(segment_ids_BS, dtype=torch.bool)
    starts_BS[:, 1:] = segment_ids_BS[:, 1:] != segment_ids_BS[:, :-1]
    return starts_BS


def gated_output(inputs: ScanInputs, y_BHSRP: Tensor, x_BHSRP: Tensor) -> Tensor:
    """Return o [B,S,H,P]: add the skip D * x, gate by silu(z * zeta), contract the ranks with phi."""
    acc = inputs.accumulate_dtype
    y_BHSRP = torch.addcmul(y_BHSRP, inputs.D.to(acc).view(-1, 1, 1, 1), x_BHSRP)
    gate_BHSRP = inputs.z.to(acc).transpose(1, 2).unsqueeze(3) * inputs.zeta.to(acc).unsqueeze(1)
    gated_BHSRP = y_BHSRP * functional.silu(gate_BHSRP) * inputs.phi.to(acc).unsqueeze(1)
    return gated_BHSRP.sum(3).transpose(1, 2).to(inputs.v.dtype)


def _cumulated_angles(inputs: ScanInputs, starts_BS: Tensor | None) -> Tensor:
    """Return theta [B,H,S,A] in [0, 2 pi), summed in float64 because it grows with the sequence.

    Only differences within a document matter. The sum restarts with the document all the same, or the gradients of
    its angles would carry the rounding noise of every later document.
    """
    angle_BHSA = inputs.angles.transpose(1, 2).double()
    if not inputs.angles_cumulated:
        step_BHSA = math.pi * torch.tanh(angle_BHSA) * inputs.dt.double().unsqueeze(-1)
        angle_BHSA = torch.cumsum(step_BHSA, dim=2)
        if starts_BS is not None:
            first_BHSA = _first_token(starts_BS)[:, None, :, None].expand_as(angle_BHSA)
            angle_BHSA = angle_BHSA - (angle_BHSA - step_BHSA).gather(2, first_BHSA)
    return torch.remainder(angle_BHSA, 2 * math.pi).to(inputs.accumulate_dtype)


def _first_token(starts_BS: Tensor) -> Tensor:
    """Return, for every token, the index of the first token of its document [B,S]."""
    index_S = torch.arange(starts_BS.shape[1], device=starts_BS.device)
    return torch.where(starts_BS, index_S, 0).cummax(1).values


def _rotated(direction_BSRGN: Tensor, bias_HRN: Tensor, angle_BHSA: Tensor) -> Tensor:
    """Return [B,H,S,R,N]: groups spread over heads, bias added, pairs (j, N/2 + j) turned by angle j."""
    acc = angle_BHSA.dtype
    num_heads, half = bias_HRN.shape[0], direction_BSRGN.shape[-1] // 2
    heads_per_group = num_heads // direction_BSRGN.shape[3]
    spread_BHSRN = direction_BSRGN.permute(0, 3, 1, 2, 4).repeat_interleave(heads_per_group, dim=1)
    biased_BHSRN = spread_BHSRN.to(acc) + bias_HRN.to(acc).unsqueeze(1)
    angle_BHS1J = functional.pad(angle_BHSA, (0, half - angle_BHSA.shape[-1])).unsqueeze(3)
    cos, sin = angle_BHS1J.cos(), angle_BHS1J.sin()
    left, right = biased_BHSRN[..., :half], biased_BHSRN[..., half:]
    turned = torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)
    return turned.to(direction_BSRGN.dtype).to(acc)
