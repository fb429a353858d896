"""Reference scan: the recurrence step by step, and its chunk-parallel form. Shape suffixes: see inputs.py.

Step form. With decay alpha_t = exp(adt_t), beta_t = (1 - mix_t) dt_t alpha_t and gamma_t = mix_t dt_t, the state is
S_t = alpha_t S_{t-1} + beta_t k_{t-1}^T x_{t-1} + gamma_t k_t^T x_t, and y_t = q_t S_t. For the first token S_{-1} is
the entering state, which already holds the previous write.

Chunk-parallel form: dense matmuls over all chunks at once, then one pass over the states of the chunks. Two regroupings
of the recurrence make it work:

- A token's write is counted once, with weight gamma_u + sigma_u. The share sigma_u = (1 - mix_{u+1}) dt_{u+1} is the
  addition of the next step. So the last row of a chunk looks one token ahead, and the state between chunks already
  holds that share.
- The same step sees gamma alone, which is the diagonal of the score weights.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ablate.kernels import facts
from ablate.kernels.backends import Lane
from ablate.kernels.mamba3_mimo.inputs import ScanInputs
from ablate.kernels.mamba3_mimo.operands import Operands, gated_output, handed_on, operands, running_sum
from ablate.kernels.scan_switches import ScanFact


def step_form(inputs: ScanInputs, x_BHSRP: Tensor) -> tuple[Tensor, Tensor]:
    """Return (o, final state [B,H,N,P]) by the step form, from PsiV `x_BHSRP`.

    o is [B,S,H,P], or [B,S,R,H,P] without phi. `handed_on` defines the angle of the state.
    """
    facts.record(ScanFact.LANE, Lane.REFERENCE.value)
    facts.record(ScanFact.SCHEDULE, "sequential")
    parts = operands(inputs, x_BHSRP)
    y_BHSRP, state_BHNP = _walk(parts)
    return gated_output(inputs, y_BHSRP, parts.x_BHSRP), handed_on(state_BHNP, parts.last_angle_BHA)


def _walk(parts: Operands) -> tuple[Tensor, Tensor]:
    """Return (y [B,H,S,R,P], final state)."""
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
    """Return (alpha, beta), both zero at the start of a document, which receives no state."""
    alpha_BHS = parts.adt_BHS.exp()
    if parts.starts_BS is not None:
        alpha_BHS = alpha_BHS.masked_fill(parts.starts_BS.unsqueeze(1), 0)
    return alpha_BHS, parts.look_BHS * alpha_BHS


def _with_previous(t_BHSRX: Tensor, own_BHS: Tensor | None = None, previous_BHS: Tensor | None = None) -> Tensor:
    """Return [B,H,S,2R,X]: rows of this token and of the previous one (0 at t=0), each times its weight."""
    shifted = torch.cat((torch.zeros_like(t_BHSRX[:, :, :1]), t_BHSRX[:, :, :-1]), dim=2)
    if own_BHS is None or previous_BHS is None:
        return torch.cat((t_BHSRX, shifted), dim=3)
    return torch.cat((t_BHSRX * own_BHS[..., None, None], shifted * previous_BHS[..., None, None]), dim=3)


@dataclass(frozen=True, kw_only=True)
class _Decays:
    """Scalar weights of every chunk, [B,H,K,...]."""

    scores_BHKCC: Tensor
    """Write of token u in the output of token t: gamma + sigma with decay below the diagonal, gamma on it."""
    read_BHKC: Tensor
    """Entering state of the chunk in the output of token t."""
    write_BHKC: Tensor
    """Write of token u in the leaving state of the chunk."""
    carry_BHK: Tensor
    """Entering state in the leaving state."""


def chunk_parallel(inputs: ScanInputs, x_BHSRP: Tensor, *, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Return (o, final state [B,H,N,P]) by the chunk-parallel form, from PsiV `x_BHSRP`, for any S.

    o is [B,S,H,P], or [B,S,R,H,P] without phi. `handed_on` defines the angle of the state.
    """
    facts.record(ScanFact.LANE, Lane.REFERENCE.value)
    facts.record(ScanFact.SCHEDULE, "chunk_parallel")
    facts.record(ScanFact.CHUNK_SIZE, chunk_size)
    parts = operands(inputs, x_BHSRP)
    decays = _decays(parts, chunk_size)
    matrices = (parts.q_BHSRN, parts.k_BHSRN, parts.x_BHSRP)
    q_BHKMN, k_BHKMN, x_BHKMP = (_chunked(t, chunk_size).flatten(3, 4) for t in matrices)
    ranks = x_BHSRP.shape[3]
    local_BHKNP = k_BHKMN.transpose(-1, -2) @ (x_BHKMP * _rows(decays.write_BHKC, ranks))
    entering_BHKNP, final_BHNP = _pass_states(parts.entering_BHNP, local_BHKNP, decays.carry_BHK)
    scores_BHKMM = _weigh(q_BHKMN @ k_BHKMN.transpose(-1, -2), decays.scores_BHKCC)
    y_BHKMP = torch.baddbmm(
        (scores_BHKMM @ x_BHKMP).flatten(0, 2),
        (q_BHKMN * _rows(decays.read_BHKC, ranks)).flatten(0, 2),
        entering_BHKNP.flatten(0, 2),
    ).view_as(x_BHKMP)
    y_BHSRP = y_BHKMP.reshape(*x_BHSRP.shape[:2], -1, *x_BHSRP.shape[3:])[:, :, : x_BHSRP.shape[2]]
    return gated_output(inputs, y_BHSRP, parts.x_BHSRP), handed_on(final_BHNP, parts.last_angle_BHA)


def _chunked(t_BHS: Tensor, chunk_size: int) -> Tensor:
    """Split axis 2 (time) into [K, C]. The tail is padded with zeros: no decay, no write."""
    missing = -t_BHS.shape[2] % chunk_size
    if missing:
        t_BHS = functional.pad(t_BHS, (0, 0) * (t_BHS.dim() - 3) + (0, missing))
    return t_BHS.reshape(*t_BHS.shape[:2], -1, chunk_size, *t_BHS.shape[3:])


def _rows(weight_BHKC: Tensor, ranks: int) -> Tensor:
    """Repeat one weight per token for its R rows: [B,H,K,M,1]."""
    return weight_BHKC.repeat_interleave(ranks, dim=-1).unsqueeze(-1)


def _weigh(scores_BHKMM: Tensor, weight_BHKCC: Tensor) -> Tensor:
    """Multiply each R x R block of scores by the weight of its pair of tokens."""
    chunk_size = weight_BHKCC.shape[-1]
    ranks = scores_BHKMM.shape[-1] // chunk_size
    blocks = scores_BHKMM.reshape(*scores_BHKMM.shape[:3], chunk_size, ranks, chunk_size, ranks)
    return (blocks * weight_BHKCC[..., :, None, :, None]).reshape(scores_BHKMM.shape)


def _decays(parts: Operands, chunk_size: int) -> _Decays:
    # float64: gradients of decays are differences of sums that must cancel between the documents of a chunk
    sum_BHKC = running_sum(_chunked(parts.adt_BHS, chunk_size).double(), dim=-1)
    acc = parts.adt_BHS.dtype
    log_BHKC, rest_BHKC = sum_BHKC.to(acc), (sum_BHKC[..., -1:] - sum_BHKC).to(acc)
    gamma_BHKC = _chunked(parts.gamma_BHS, chunk_size)
    scale_BHKC = gamma_BHKC + _chunked(_sigma(parts), chunk_size)
    visible = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=log_BHKC.device).tril(-1)
    read_BHKC, carry_BHK = log_BHKC.exp(), log_BHKC[..., -1].exp()
    write_BHKC = rest_BHKC.exp() * scale_BHKC
    if parts.starts_BS is not None:
        run_B1KC = _document_index(parts.starts_BS, chunk_size)
        last_B1K1 = run_B1KC[..., -1:]
        before_B1K1 = torch.cat((torch.zeros_like(last_B1K1[:, :, :1]), last_B1K1[:, :, :-1]), dim=2)
        visible = visible & (run_B1KC.unsqueeze(-1) == run_B1KC.unsqueeze(-2))
        read_BHKC = read_BHKC * (run_B1KC == before_B1K1)
        write_BHKC = write_BHKC * (run_B1KC == last_B1K1)
        carry_BHK = carry_BHK * (last_B1K1 == before_B1K1).squeeze(-1)
    # masked before exp: above the diagonal the difference is positive and may overflow
    span_BHKCC = (sum_BHKC.unsqueeze(-1) - sum_BHKC.unsqueeze(-2)).masked_fill(~visible, -torch.inf)
    scores_BHKCC = span_BHKCC.to(acc).exp() * scale_BHKC.unsqueeze(-2) + torch.diag_embed(gamma_BHKC)
    return _Decays(scores_BHKCC=scores_BHKCC, read_BHKC=read_BHKC, write_BHKC=write_BHKC, carry_BHK=carry_BHK)


def _sigma(parts: Operands) -> Tensor:
    """Return the look-ahead weight [B,H,S]: zero at the end of the row and of every document."""
    look_BHS = parts.look_BHS
    if parts.starts_BS is not None:
        look_BHS = look_BHS.masked_fill(parts.starts_BS.unsqueeze(1), 0)
    return functional.pad(look_BHS[..., 1:], (0, 1))


def _document_index(starts_BS: Tensor, chunk_size: int) -> Tensor:
    """Return each token's document number within its row [B,1,K,C]; padding belongs to the last document."""
    missing = -starts_BS.shape[1] % chunk_size
    return functional.pad(starts_BS, (0, missing)).cumsum(1).view(starts_BS.shape[0], 1, -1, chunk_size)


def _pass_states(state_BHNP: Tensor, local_BHKNP: Tensor, carry_BHK: Tensor) -> tuple[Tensor, Tensor]:
    """Return (state entering each chunk [B,H,K,N,P], state after the last chunk [B,H,N,P])."""
    entering = []
    for local, carry in zip(local_BHKNP.unbind(2), carry_BHK[..., None, None].unbind(2), strict=True):
        entering.append(state_BHNP)
        state_BHNP = torch.addcmul(local, carry, state_BHNP)
    return torch.stack(entering, dim=2), state_BHNP
