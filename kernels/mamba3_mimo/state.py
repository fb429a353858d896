"""What a scan leaves behind for the one that goes on with its rows. Shape suffixes: see inputs.py.

Official Mamba-3 hands on the state, the cumulated angle, and key and value of the last token. Only differences of
angles matter, so the state is turned back by the last token's angle here, and the next scan counts its angles from 0;
and of key and value only their product matters, the write that the next token adds a share of.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.errors import ShapeError
from kernels.mamba3_mimo.inputs import ScanInputs
from kernels.mamba3_mimo.operands import psiv, rotated


class ScanState(NamedTuple):
    """What the last tokens of a scan leave behind, one for each row.

    Raw angles: counted from the last token, so whatever goes on counts its own from 0. Cumulated angles, which go on
    counting themselves: from 0.
    """

    state: Tensor
    """S after the last token [B,H,N,P], float32 (float64 where the scan runs in float64)."""
    write: Tensor | None = None
    """What the last token wrote, the sum over ranks of k~ x^T [B,H,N,P], dtype of `state`: the next token of its
    document adds (1 - sigmoid(trap)) dt of it. None: nothing."""
    segment_ids: Tensor | None = None
    """[B] id of the document of the last token: a row that goes on with another id begins with nothing. None: whatever
    comes belongs to the same document."""

    def detached(self) -> "ScanState":
        """Return the same without a way back for gradients: where backpropagation through time is truncated."""
        return ScanState(self.state.detach(), None if self.write is None else self.write.detach(), self.segment_ids)


def entered(inputs: ScanInputs, before: ScanState) -> ScanInputs:
    """Return the inputs of rows that go on from `before`; raises ShapeError when they do not fit together."""
    _check(inputs, before)
    acc = inputs.accumulate_dtype
    state_BHNP = before.state.to(acc)
    if before.write is not None:
        look_BH = torch.sigmoid(-inputs.trap[:, :, 0].to(acc)) * inputs.dt[:, :, 0].to(acc)
        state_BHNP = state_BHNP + look_BH[..., None, None] * before.write.to(acc)
    if before.segment_ids is not None and inputs.segment_ids is not None:
        goes_on_B = inputs.segment_ids[:, 0] == before.segment_ids
        state_BHNP = state_BHNP.where(goes_on_B.view(-1, 1, 1, 1), 0)
    return replace(inputs, entering=state_BHNP)


def left_behind(inputs: ScanInputs, state_BHNP: Tensor) -> ScanState:
    """Return what a scan of `inputs` leaves behind whose final state is `state_BHNP`."""
    acc = inputs.accumulate_dtype
    angle_BHA = inputs.angles[:, -1].to(acc).expand(-1, inputs.num_heads, -1)
    if not inputs.angles_cumulated:
        angle_BHA = torch.zeros_like(angle_BHA)
    key_BHRN = rotated(inputs.k[:, -1:], inputs.k_bias, angle_BHA.unsqueeze(2))[:, :, 0]
    x_BHRP = psiv(inputs.v[:, -1:], inputs.psi)[:, :, 0].to(acc)
    ids_BS = inputs.segment_ids
    return ScanState(state_BHNP, key_BHRN.mT @ x_BHRP, None if ids_BS is None else ids_BS[:, -1])


def _check(inputs: ScanInputs, before: ScanState) -> None:
    if inputs.entering is not None:
        raise ShapeError("initial_state and the inputs' entering are both given; allowed: one of them")
    batch, heads, width = inputs.v.shape[0], inputs.num_heads, inputs.v.shape[3]
    size = (batch, heads, inputs.state_size, width)
    for name, tensor, expected in (
        ("state", before.state, size),
        ("write", before.write, size),
        ("segment_ids", before.segment_ids, (batch,)),
    ):
        if tensor is not None and tuple(tensor.shape) != expected:
            raise ShapeError(f"initial_state.{name} has shape {list(tensor.shape)}; expected {list(expected)}")
    if before.segment_ids is not None and inputs.segment_ids is None:
        raise ShapeError(
            "initial_state has segment_ids and the inputs have none; allowed: both, or an initial_state without"
        )
