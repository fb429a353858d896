"""Parts of the reference scan: biased rotated operands, trapezoid weights, document starts, output gate.

Operands are rounded to the dtype of the operation and then multiplied in float32, so bfloat16 means bfloat16
operands with float32 products, sums and states. Shape suffixes: see inputs.py.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ablate.kernels import facts
from ablate.kernels.documents import document_starts
from ablate.kernels.mamba3_mimo.inputs import ScanInputs
from ablate.kernels.scan_switches import ScanFact

_SUM_BLOCK = 256


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Operands of the recurrence, in the accumulation dtype."""

    q_BHSRN: Tensor
    """Biased, rotated reading directions."""
    k_BHSRN: Tensor
    """Biased, rotated writing directions."""
    x_BHSRP: Tensor
    """PsiV: the values, expanded over ranks."""
    adt_BHS: Tensor
    """Log decay of each step."""
    gamma_BHS: Tensor
    """Weight of a token's write at its own step, sigmoid(trap) * dt."""
    look_BHS: Tensor
    """(1 - sigmoid(trap)) * dt: weight of the previous token's write at this step."""
    starts_BS: Tensor | None
    """Whether a token starts a document; None if every row is one document."""
    entering_BHNP: Tensor
    """State before the first token."""
    last_angle_BHA: Tensor | None
    """Angle of the last token, from which the final state counts; None for cumulated angles, which count from 0."""


def contained(inputs: ScanInputs) -> tuple[ScanInputs, Tensor | None]:
    """Return the inputs with zeros from a document's first NaN or infinity on, and which tokens these are [B,S].

    Sums over a row contain other documents with weight zero, and zero times infinity is NaN. So without this, a broken
    document breaks the others of its row. The caller returns NaN for the tokens. None instead of tokens: nothing had to
    change. Only a CPU looks whether that is so, because others would have to wait for the answer.
    """
    if inputs.segment_ids is None:
        return inputs, None
    axes = {name: time_axis for name, time_axis in _TIME_AXES.items() if getattr(inputs, name) is not None}
    with torch.no_grad():
        states = [] if inputs.entering is None else [inputs.entering]
        sums = (tensor.sum() for tensor in (*(getattr(inputs, name) for name in axes), *states))
        if inputs.v.device.type == "cpu" and all(bool(one.isfinite()) for one in sums):
            return inputs, None
        bad_BS = torch.zeros_like(inputs.segment_ids, dtype=torch.bool)
        for name, axis in axes.items():
            bad_BS |= ~getattr(inputs, name).isfinite().movedim(axis, 1).flatten(2).all(2)
        for state in states:
            bad_BS[:, 0] |= ~state.isfinite().flatten(1).all(1)
        count_BS = bad_BS.long().cumsum(1)
        before_BS = (count_BS - bad_BS.long()).gather(1, _first_token(document_starts(inputs.segment_ids)))
        broken_BS = count_BS > before_BS
    kept: dict[str, Any] = {name: _emptied(getattr(inputs, name), broken_BS, axis) for name, axis in axes.items()}
    if inputs.entering is not None:
        kept["entering"] = inputs.entering.masked_fill(bad_BS[:, 0].view(-1, 1, 1, 1), 0)
    return replace(inputs, **kept), broken_BS


_TIME_AXES = {"q": 1, "k": 1, "v": 1, "z": 1, "adt": 2, "dt": 2, "trap": 2, "angles": 1}


def _emptied(tensor: Tensor, broken_BS: Tensor, time_axis: int) -> Tensor:
    shape = [broken_BS.shape[0], *(1 for _ in range(tensor.dim() - 1))]
    shape[time_axis] = broken_BS.shape[1]
    return tensor.masked_fill(broken_BS.view(shape), 0)


def operands(inputs: ScanInputs, x_BHSRP: Tensor) -> Operands:
    """Return the operands of the recurrence; PsiV `x_BHSRP` replaces v and psi. Records their dtype before the sums."""
    for operand in (inputs.q, inputs.k, x_BHSRP):
        facts.record(ScanFact.DTYPE, dtype_name(operand))
    acc = inputs.accumulate_dtype
    dt_BHS = inputs.dt.to(acc)
    mix_BHS = torch.sigmoid(inputs.trap.to(acc))
    starts_BS = None if inputs.segment_ids is None else document_starts(inputs.segment_ids)
    angle_BHSA = cumulated_angles(inputs, starts_BS)
    return Operands(
        q_BHSRN=rotated(inputs.q, inputs.q_bias, angle_BHSA),
        k_BHSRN=rotated(inputs.k, inputs.k_bias, angle_BHSA),
        x_BHSRP=x_BHSRP.to(acc),
        adt_BHS=inputs.adt.to(acc),
        gamma_BHS=mix_BHS * dt_BHS,
        look_BHS=(1 - mix_BHS) * dt_BHS,
        starts_BS=starts_BS,
        entering_BHNP=_entering(inputs),
        last_angle_BHA=None if inputs.angles_cumulated else angle_BHSA[:, :, -1],
    )


def _entering(inputs: ScanInputs) -> Tensor:
    acc = inputs.accumulate_dtype
    if inputs.entering is not None:
        return inputs.entering.to(acc)
    batch, _, heads, width = inputs.v.shape
    return inputs.v.new_zeros(batch, heads, inputs.state_size, width, dtype=acc)


def handed_on(state_BHNP: Tensor, last_angle_BHA: Tensor | None) -> Tensor:
    """Return the final state with angles counted from the last token, whose angle is `last_angle_BHA`.

    Only differences of angles matter, so a scan that continues counts its own angles from 0.
    """
    if last_angle_BHA is None:
        return state_BHNP
    return state_turned_back(state_BHNP, last_angle_BHA.cos(), last_angle_BHA.sin())


def state_turned_back(state_BHNP: Tensor, cos_BHA: Tensor, sin_BHA: Tensor) -> Tensor:
    """Return the state with its pairs of rows (j, N/2 + j) turned back by angle j."""
    half, count = state_BHNP.shape[2] // 2, cos_BHA.shape[-1]
    left, right = state_BHNP[:, :, :half], state_BHNP[:, :, half:]
    lo, hi = left[:, :, :count], right[:, :, :count]
    cos, sin = cos_BHA.unsqueeze(-1), sin_BHA.unsqueeze(-1)
    return torch.cat((lo * cos + hi * sin, left[:, :, count:], hi * cos - lo * sin, right[:, :, count:]), dim=2)


def dtype_name(tensor: Tensor) -> str:
    """Return the tensor's dtype in the form of `ScanFact.DTYPE`."""
    return str(tensor.dtype).removeprefix("torch.")


def psiv(v_BSHP: Tensor, psi_HRP: Tensor) -> Tensor:
    """Return PsiV [B,H,S,R,P] = v * psi, rounded to the dtype of v."""
    acc = torch.promote_types(v_BSHP.dtype, torch.float32)
    v_BHS1P = v_BSHP.transpose(1, 2).unsqueeze(3)
    return (v_BHS1P.to(acc) * psi_HRP.to(acc).unsqueeze(1)).to(v_BSHP.dtype).contiguous()


def gated_output(inputs: ScanInputs, y_BHSRP: Tensor, x_BHSRP: Tensor) -> Tensor:
    """Return o [B,S,H,P], or [B,S,R,H,P] without phi.

    Adds the skip D * x, applies the output gate silu(z * zeta) and contracts the ranks with phi, each if present.
    """
    acc = inputs.accumulate_dtype
    if inputs.D is not None:
        y_BHSRP = torch.addcmul(y_BHSRP, inputs.D.to(acc).view(-1, 1, 1, 1), x_BHSRP)
    if inputs.z is not None and inputs.zeta is not None:
        gate_BHSRP = inputs.z.to(acc).transpose(1, 2).unsqueeze(3) * inputs.zeta.to(acc).unsqueeze(1)
        y_BHSRP = y_BHSRP * functional.silu(gate_BHSRP)
    if inputs.phi is None:
        return y_BHSRP.permute(0, 2, 3, 1, 4).to(inputs.v.dtype)
    return (y_BHSRP * inputs.phi.to(acc).unsqueeze(1)).sum(3).transpose(1, 2).to(inputs.v.dtype)


def cumulated_angles(inputs: ScanInputs, starts_BS: Tensor | None) -> Tensor:
    """Return theta [B,H,S,A] in [0, 2 pi), summed in float64 because it grows with the sequence.

    Only differences within a document matter. The sum still restarts with each document: otherwise the gradients of
    its angles would contain the rounding noise of every later document.
    """
    if inputs.angles_cumulated:
        angle_BHSA = inputs.angles.transpose(1, 2).double()
    else:
        step_BHSA = angle_steps(inputs)
        angle_BHSA = running_sum(step_BHSA, dim=2)
        if starts_BS is not None:
            first_BHSA = _first_token(starts_BS)[:, None, :, None].expand_as(angle_BHSA)
            angle_BHSA = angle_BHSA - (angle_BHSA - step_BHSA).gather(2, first_BHSA)
    return torch.remainder(angle_BHSA, math.tau).to(inputs.accumulate_dtype)


def running_sum(t: Tensor, *, dim: int) -> Tensor:
    """Return the inclusive running sum of the float64 `t` along `dim`, deterministic on every device.

    torch.cumsum of floating point is not deterministic on a GPU; there the sum is a product with triangles of ones.
    """
    if t.device.type != "cuda":
        return torch.cumsum(t, dim=dim)
    length = t.shape[dim]
    rows = functional.pad(t.movedim(dim, -1), (0, -length % _SUM_BLOCK))
    inside = rows.reshape(*rows.shape[:-1], -1, _SUM_BLOCK) @ _ones(_SUM_BLOCK, t).triu()
    before = inside[..., -1] @ _ones(inside.shape[-2], t).triu(1)
    summed = (inside + before.unsqueeze(-1)).flatten(-2)[..., :length]
    return summed.movedim(-1, dim)


def _ones(size: int, like: Tensor) -> Tensor:
    return torch.ones(size, size, dtype=like.dtype, device=like.device)


def angle_steps(inputs: ScanInputs) -> Tensor:
    """Return each token's angle step, pi * tanh(raw angle) * dt, float64 [B,H,S,A]."""
    return math.pi * torch.tanh(inputs.angles.transpose(1, 2).double()) * inputs.dt.double().unsqueeze(-1)


def _first_token(starts_BS: Tensor) -> Tensor:
    """Return for every token the index of its document's first token [B,S]."""
    index_S = torch.arange(starts_BS.shape[1], device=starts_BS.device)
    return torch.where(starts_BS, index_S, 0).cummax(1).values


def rotated(direction_BSRGN: Tensor, bias_HRN: Tensor, angle_BHSA: Tensor) -> Tensor:
    """Return [B,H,S,R,N]: groups repeated for their heads, bias added, pairs (j, N/2 + j) turned by angle j."""
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
