"""Products of whole chunks of tokens on XLA, by the equations of reference.py.

No difference of sums is taken. A decay between two tokens is summed over the tokens between them, so float32 is
enough and documents in one chunk do not disturb each other. Shape suffixes: see inputs.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from ablate.kernels.mamba3_mimo.inputs import ScanInputs
from ablate.kernels.mamba3_mimo.operands import gated_output, psiv, rotated
from ablate.kernels.mamba3_mimo.xla.timeline import Timeline, split


@dataclass(frozen=True, kw_only=True)
class Decays:
    """Scalar weights of every chunk."""

    scores_BHKCC: Tensor
    """Write of token u in the output of token t."""
    read_BHKC: Tensor
    """Entering state of the chunk in the output of token t."""
    write_BHKC: Tensor
    """Write of token u in the leaving state of the chunk."""
    total_BHK: Tensor
    """Log decay over the whole chunk."""
    last_B1K: Tensor
    """Document number of the chunk's last token."""


Enter: TypeAlias = Callable[[Tensor, Decays], tuple[Tensor, Tensor]]
"""(addition of each chunk to the state [B,H,K,N,P], decays) -> (state entering each chunk, state after the last)."""


def chunk_outputs(
    inputs: ScanInputs, line: Timeline, before_B1: Tensor, chunk_size: int, enter: Enter
) -> tuple[Tensor, Tensor]:
    """Return (o, last state [B,H,N,P]) of `inputs`, whose length is a multiple of `chunk_size`.

    o is [B,T,H,P], or [B,T,R,H,P] without phi. `before_B1` is the document number of the token before the first.
    """
    x_BHTRP = psiv(inputs.v, inputs.psi)
    acc_BHTRP, ranks = x_BHTRP.to(inputs.accumulate_dtype), x_BHTRP.shape[3]
    q_BHTRN = rotated(inputs.q, inputs.q_bias, line.angle_BHTA)
    k_BHTRN = rotated(inputs.k, inputs.k_bias, line.angle_BHTA)
    q_BHKMN, k_BHKMN, x_BHKMP = (_rows_of_chunks(t, chunk_size) for t in (q_BHTRN, k_BHTRN, acc_BHTRP))
    decays = chunk_decays(line, before_B1, chunk_size)
    local_BHKNP = (k_BHKMN * _rows(decays.write_BHKC, ranks)).mT @ x_BHKMP
    entering_BHKNP, final_BHNP = enter(local_BHKNP, decays)
    scores_BHKMM = _weigh(q_BHKMN @ k_BHKMN.mT, decays.scores_BHKCC, ranks)
    y_BHKMP = scores_BHKMM @ x_BHKMP + (q_BHKMN * _rows(decays.read_BHKC, ranks)) @ entering_BHKNP
    return gated_output(inputs, _tokens_of_rows(y_BHKMP, ranks), acc_BHTRP), final_BHNP


def chunk_decays(line: Timeline, before_B1: Tensor, chunk_size: int) -> Decays:
    """Return the weights of every chunk."""
    adt_BHKC, gamma_BHKC, scale_BHKC = (
        split(t, 2, -1, chunk_size) for t in (line.adt_BHT, line.gamma_BHT, line.scale_BHT)
    )
    run_B1KC = split(line.run_BT, 1, -1, chunk_size).unsqueeze(1)
    last_B1K = run_B1KC[..., -1]
    before_B1K = torch.cat((before_B1.unsqueeze(1), last_B1K[..., :-1]), dim=2)
    span_BHKCC = between(adt_BHKC)
    visible_B1KCC = (run_B1KC.unsqueeze(-1) == run_B1KC.unsqueeze(-2)).tril(-1)
    log_BHKC = adt_BHKC.cumsum(-1)
    return Decays(
        scores_BHKCC=span_BHKCC.exp() * visible_B1KCC * scale_BHKC.unsqueeze(-2) + torch.diag_embed(gamma_BHKC),
        read_BHKC=log_BHKC.exp() * (run_B1KC == before_B1K.unsqueeze(-1)),
        write_BHKC=span_BHKCC[..., -1, :].exp() * scale_BHKC * (run_B1KC == last_B1K.unsqueeze(-1)),
        total_BHK=log_BHKC[..., -1],
        last_B1K=last_B1K,
    )


def between(log_X: Tensor) -> Tensor:
    """Return [...,X,X]: entry (t, u) is the sum over u < w <= t of the log decays [...,X]; 0 on and above the diagonal.

    No entry is positive, so its exponential cannot overflow.
    """
    size = log_X.shape[-1]
    repeated = log_X.unsqueeze(-1).expand(*log_X.shape, size).tril(-1)
    return repeated.cumsum(-2)


def pass_states(local_BHKNP: Tensor, decays: Decays) -> tuple[Tensor, Tensor]:
    """Return (state entering each chunk, state after the last) of rows that start from zero, in one product."""
    last_B1K = decays.last_B1K
    visible_B1KK = (last_B1K.unsqueeze(-1) == last_B1K.unsqueeze(-2)).tril()
    weight_BHKK = between(decays.total_BHK).exp() * visible_B1KK
    leaving_BHKNP = (weight_BHKK @ local_BHKNP.flatten(3)).view_as(local_BHKNP)
    entering_BHKNP = functional.pad(leaving_BHKNP[:, :, :-1], (0, 0, 0, 0, 1, 0))
    return entering_BHKNP, leaving_BHKNP[:, :, -1]


def pass_states_from(state_BHNP: Tensor, before_B1: Tensor) -> Enter:
    """Return `pass_states` for rows that start from `state_BHNP` in document `before_B1`."""

    def enter(local_BHKNP: Tensor, decays: Decays) -> tuple[Tensor, Tensor]:
        entering_BHKNP, final_BHNP = pass_states(local_BHKNP, decays)
        carry_BHK = decays.total_BHK.cumsum(-1).exp() * (decays.last_B1K == before_B1.unsqueeze(1))
        carried_BHKNP = carry_BHK[..., None, None] * state_BHNP.unsqueeze(2)
        before_BHKNP = torch.cat((state_BHNP.unsqueeze(2), carried_BHKNP[:, :, :-1]), dim=2)
        return entering_BHKNP + before_BHKNP, final_BHNP + carried_BHKNP[:, :, -1]

    return enter


def step_state(state_BHNP: Tensor, before_B1: Tensor) -> Enter:
    """Return the function `Enter` of one chunk, for rows with `state_BHNP` from document `before_B1`."""

    def enter(local_BH1NP: Tensor, decays: Decays) -> tuple[Tensor, Tensor]:
        carry_BH1 = decays.total_BHK.exp() * (decays.last_B1K == before_B1.unsqueeze(1))
        return state_BHNP.unsqueeze(2), carry_BH1.unsqueeze(-1) * state_BHNP + local_BH1NP.squeeze(2)

    return enter


def _rows_of_chunks(t_BHTRX: Tensor, chunk_size: int) -> Tensor:
    """Return [B,H,K,M,X]: the R * C rows of every chunk, grouped by rank.

    A TPU pads the last axis to 128 and the axis before it to 8, so neither may be the axis of ranks.
    """
    return split(t_BHTRX, 2, -1, chunk_size).transpose(3, 4).flatten(3, 4)


def _tokens_of_rows(t_BHKMX: Tensor, ranks: int) -> Tensor:
    """Return [B,H,T,R,X], the inverse of `_rows_of_chunks`."""
    return split(t_BHKMX, 3, ranks, -1).transpose(3, 4).flatten(2, 3)


def _rows(weight_BHKC: Tensor, ranks: int) -> Tensor:
    """Repeat one weight per token for its R rows: [B,H,K,M,1]."""
    return weight_BHKC.repeat(1, 1, 1, ranks).unsqueeze(-1)


def _weigh(scores_BHKMM: Tensor, weight_BHKCC: Tensor, ranks: int) -> Tensor:
    """Multiply the R * R scores of each pair of tokens by the pair's weight."""
    return scores_BHKMM * weight_BHKCC.repeat(1, 1, 1, ranks, ranks)
