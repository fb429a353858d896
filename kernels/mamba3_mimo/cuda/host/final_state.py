"""Contribution of the final state and its gradient to the gradients of decay and angle. Letters: see shape.py.

The gradients of a token's decay and angle are sums over everything later, see `make_edge` in backward/gradients_chunk.
Behind the last token this sum is <E, S>, of the final state S and its gradient E. The final state is turned with the
last token, so both sums are added there.

If little of the state survives a token, <E, S> almost cancels against the writes of the last tokens, and the rest would
be rounding. But the whole span must sum to the edge at its start. A difference was rounded in <E, S> and in the writes
that E met, so it is added there.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ablate.kernels.mamba3_mimo.cuda.pieces.positions import EDGE
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape
from ablate.kernels.mamba3_mimo.operands import running_sum

TINY = 1e-30
"""Below the square of every weight of a write that matters."""


class RowEnd(NamedTuple):
    """End of the rows, fp32 [B,H,N,P], with the angles of ScanState."""

    state: Tensor
    """Final state."""
    gradient: Tensor
    """Gradient of the final state."""


class Span(NamedTuple):
    """Tokens from the last edge, or from a later start of the document, to the end of the row."""

    tokens: slice
    """The n tokens from the edge on."""
    inside_Bn: Tensor
    """Whether a token belongs to the row's last document."""
    goes_on_B: Tensor
    """Whether that document started before the edge."""


def edge(gradient_BHNP: Tensor, state_BHNP: Tensor) -> Tensor:
    """Return the sums of the gradients from a token on, [B,H,2,N], in the form of `make_edge`."""
    far_BHNP = state_BHNP.roll(state_BHNP.shape[2] // 2, 2)
    return torch.stack(((gradient_BHNP * state_BHNP).sum(-1), (gradient_BHNP * far_BHNP).sum(-1)), dim=2)


def sums(edge_BH2N: Tensor, angles: int) -> tuple[Tensor, Tensor]:
    """Return the sums of an edge: of the decay's gradient [B,H,1] and of the angles' gradients [B,H,A]."""
    decay_BHN, turn_BHN = edge_BH2N.unbind(2)
    half = turn_BHN.shape[-1] // 2
    return decay_BHN.sum(-1, keepdim=True), turn_BHN[..., :angles] - turn_BHN[..., half : half + angles]


def last_span(reset_BS: Tensor, num_tokens: int) -> Span:
    """Return the last span of rows with document starts `reset_BS`."""
    tokens = slice((num_tokens - 1) // EDGE * EDGE, num_tokens)
    starts_Bn = reset_BS[:, tokens]
    at_n = torch.arange(starts_Bn.shape[1], device=starts_Bn.device)
    first_B = (starts_Bn * at_n).amax(1)
    return Span(tokens, at_n >= first_B.unsqueeze(1), starts_Bn.amax(1) == 0)


def shares(span: Span, adt_BHn: Tensor, scale_BHn: Tensor) -> Tensor:
    """Return each token's share of a span's difference [B,H,n]. Half of it belongs to <E, S>, at the last token."""
    total_BHn = running_sum(adt_BHn.double(), dim=2)
    met_BHn = (total_BHn[..., -1:] - total_BHn).exp() * scale_BHn * span.inside_Bn.unsqueeze(1)
    share_BHn = met_BHn.square() / met_BHn.square().sum(-1, keepdim=True).clamp_min(TINY) / 2
    share_BHn[..., -1] = 1 - share_BHn[..., :-1].sum(-1)
    return share_BHn.to(scale_BHn.dtype)


def missing(own_BHnX: Tensor, span: Span, share_BHn: Tensor, begin_BHX: Tensor, end_BHX: Tensor) -> Tensor:
    """Return the correction of values per token [B,H,n,X], so that they sum to `begin_BHX`, with `end_BHX` behind."""
    begin_BHX = begin_BHX.where(span.goes_on_B.view(-1, 1, 1), 0)
    inside_BHnX = own_BHnX.where(span.inside_Bn[:, None, :, None], 0)
    missed_BHX = begin_BHX - end_BHX - inside_BHnX.sum(2)
    added_BHnX = share_BHn.unsqueeze(-1) * missed_BHX.unsqueeze(2)
    added_BHnX[:, :, -1] += end_BHX
    return added_BHnX


class _Parts(NamedTuple):
    """Parts of a span in the walks. It lies in one walk, or in several walks shorter than the distance of two edges."""

    shape: ScanShape
    tokens: slice

    def views(self, walked: Tensor) -> Iterator[Tensor]:
        """Yield the span's parts [B,H,tokens,...] of a tensor of walks [B*K,H,L,...]."""
        s, at = self.shape, self.tokens.start
        rows = torch.unflatten(walked, 0, (s.B, s.K))
        while at < self.tokens.stop:
            k, first = s.place(0, at)
            count = min(s.L - first, self.tokens.stop - at)
            yield rows[:, k, :, first : first + count]
            at += count

    def read(self, walked: Tensor) -> Tensor:
        """Return the span [B,H,n,...] of a tensor of walks."""
        return torch.cat(tuple(self.views(walked)), dim=2)

    def add(self, walked: Tensor, more: Tensor) -> None:
        """Add `more` [B,H,n,...] to the span of a tensor of walks."""
        at = 0
        for view in self.views(walked):
            view += more[:, :, at : at + view.shape[2]]
            at += view.shape[2]


def add_row_end(walked: dict[str, Tensor], shape: ScanShape, num_tokens: int, tensors: dict[str, Tensor]) -> None:
    """Add the contribution of the row's end to `row_q` and `dtheta` of the walk.

    `tensors`: the kernels' reset, adt and sk, and the final `state` and its `gradient`, see RowEnd.
    """
    span = last_span(tensors["reset"], num_tokens)
    parts, (k, first) = _Parts(shape, span.tokens), shape.place(0, span.tokens.start)
    share_BHn = shares(span, tensors["adt"][:, :, span.tokens], parts.read(tensors["sk"]))
    begin_BH2N = torch.unflatten(walked["edges"], 0, (shape.B, shape.K))[:, k, :, first // EDGE]
    end_BH2N = edge(tensors["gradient"], tensors["state"])
    if span.tokens.start == 0 and not shape.started:
        begin_BH2N = torch.zeros_like(end_BH2N)
    begins, ends = sums(begin_BH2N, shape.A), sums(end_BH2N, shape.A)
    row_q_BHn, row_k_BHn = (parts.read(walked[name]) for name in ("row_q", "row_k"))
    decay_BHn1 = (row_q_BHn - row_k_BHn).unsqueeze(-1)
    parts.add(walked["row_q"], missing(decay_BHn1, span, share_BHn, begins[0], ends[0]).squeeze(-1))
    if not shape.cumulated:
        dtheta_BHnA = parts.read(walked["dtheta"])
        parts.add(walked["dtheta"], missing(dtheta_BHnA, span, share_BHn, begins[1], ends[1]))
