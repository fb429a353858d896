"""Step form of the scan: the recurrence as defined, one time step after another. Shape suffixes: see inputs.py.

With decay alpha_t = exp(adt_t), beta_t = (1 - mix_t) dt_t alpha_t and gamma_t = mix_t dt_t, the state is
S_t = alpha_t S_{t-1} + beta_t k_{t-1}^T x_{t-1} + gamma_t k_t^T x_t, and y_t = q_t S_t.

Decoding continues a sequence from what its last token left behind: that is the state, and, since a step also weighs
the write of the token before, that token's key, value and angle.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import facts
from kernels.backends import Lane
from kernels.documents import document_starts
from kernels.errors import ShapeError
from kernels.mamba3_mimo.inputs import ScanInputs
from kernels.mamba3_mimo.operands import Operands, angle_steps, gated_output, operands, psiv, rotated
from kernels.scan import ScanFact


class DecodeState(NamedTuple):
    """What the last token of a sequence leaves behind; no gradient."""

    state: Tensor
    """S after the last token [B,H,N,P], float32."""
    key: Tensor
    """Its biased, rotated writing directions [B,R,H,N], dtype of k."""
    value: Tensor
    """Its v [B,H,P]."""
    angle: Tensor
    """Its cumulated angle [B,H,A] in [0, 2 pi), float32, counted from the start of its document."""


def step_form(inputs: ScanInputs, x_BHSRP: Tensor) -> tuple[Tensor, Tensor]:
    """Return (o, final state [B,H,N,P]) from PsiV `x_BHSRP`; o is [B,S,H,P], or [B,S,R,H,P] without phi."""
    facts.record(ScanFact.LANE, Lane.REFERENCE.value)
    facts.record(ScanFact.SCHEDULE, "sequential")
    parts = operands(inputs, x_BHSRP)
    batch, heads, _, ranks, state_size = parts.k_BHSRN.shape
    width = parts.x_BHSRP.shape[-1]
    nothing = (
        parts.k_BHSRN.new_zeros(batch, heads, ranks, state_size),
        parts.x_BHSRP.new_zeros(batch, heads, ranks, width),
    )
    y_BHSRP, state_BHNP = _walk(parts, parts.x_BHSRP.new_zeros(batch, heads, state_size, width), *nothing)
    return gated_output(inputs, y_BHSRP, parts.x_BHSRP), state_BHNP


@torch.no_grad()
def decode_state(inputs: ScanInputs, final_state: Tensor) -> DecodeState:
    """Return what decoding needs after a scan of `inputs` that ended in `final_state`, whatever its lane."""
    if inputs.angles_cumulated:
        angle_BHA = inputs.angles[:, -1].double()
    else:
        steps_BHSA = angle_steps(inputs)
        if inputs.segment_ids is not None:
            starts_BS = document_starts(inputs.segment_ids)
            last_BS = starts_BS.sum(1, keepdim=True) == starts_BS.cumsum(1)
            steps_BHSA = steps_BHSA * last_BS[:, None, :, None]
        angle_BHA = steps_BHSA.sum(2)
    angle_BHA = torch.remainder(angle_BHA, math.tau).to(inputs.accumulate_dtype)
    return _left_behind(inputs, final_state, angle_BHA)


@torch.no_grad()
def decode_step(inputs: ScanInputs, before: DecodeState) -> tuple[Tensor, DecodeState]:
    """Continue a sequence by the tokens of `inputs`, usually one; return (o, what they leave behind).

    `inputs` belong to the document that `before` ended in: segment_ids must be None. Raises ShapeError otherwise.
    """
    if inputs.segment_ids is not None:
        raise ShapeError("segment_ids is given; a decode step continues one document, so expected None")
    start_BHA = None if inputs.angles_cumulated else before.angle
    parts = operands(inputs, psiv(inputs.v, inputs.psi), start_BHA)
    acc = inputs.accumulate_dtype
    key_BHRN = before.key.transpose(1, 2).to(acc)
    x_BHRP = psiv(before.value.unsqueeze(1), inputs.psi)[:, :, 0].to(acc)
    y_BHSRP, state_BHNP = _walk(parts, before.state.to(acc), key_BHRN, x_BHRP)
    angle_BHA = inputs.angles[:, -1].double()
    if not inputs.angles_cumulated:
        angle_BHA = before.angle.double() + angle_steps(inputs).sum(2)
    angle_BHA = torch.remainder(angle_BHA, math.tau).to(acc)
    return gated_output(inputs, y_BHSRP, parts.x_BHSRP), _left_behind(inputs, state_BHNP, angle_BHA)


def _left_behind(inputs: ScanInputs, state_BHNP: Tensor, angle_BHA: Tensor) -> DecodeState:
    key_BHRN = rotated(inputs.k[:, -1:], inputs.k_bias, angle_BHA.unsqueeze(2))[:, :, 0]
    return DecodeState(
        state=state_BHNP,
        key=key_BHRN.transpose(1, 2).to(inputs.k.dtype).contiguous(),
        value=inputs.v[:, -1].clone(),
        angle=angle_BHA,
    )


def _walk(parts: Operands, state_BHNP: Tensor, key_BHRN: Tensor, x_BHRP: Tensor) -> tuple[Tensor, Tensor]:
    """Return (y [B,H,S,R,P], the last state) from the state, key and PsiV of the token before the first."""
    alpha_BHS, beta_BHS = _carried_weights(parts)
    writes = zip(
        alpha_BHS[..., None, None].unbind(2),
        _with_previous(parts.k_BHSRN, key_BHRN, parts.gamma_BHS, beta_BHS).transpose(-1, -2).unbind(2),
        _with_previous(parts.x_BHSRP, x_BHRP).unbind(2),
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


def _with_previous(
    t_BHSRX: Tensor, first_BHRX: Tensor, own_BHS: Tensor | None = None, previous_BHS: Tensor | None = None
) -> Tensor:
    """Return [B,H,S,2R,X]: rows of this token and of the one before (`first_BHRX` at t=0), each times its weight."""
    shifted = torch.cat((first_BHRX.unsqueeze(2), t_BHSRX[:, :, :-1]), dim=2)
    if own_BHS is None or previous_BHS is None:
        return torch.cat((t_BHSRX, shifted), dim=3)
    return torch.cat((t_BHSRX * own_BHS[..., None, None], shifted * previous_BHS[..., None, None]), dim=3)
