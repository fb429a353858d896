"""State that a scan leaves for a scan that continues its rows. Shape suffixes: see inputs.py.

Official Mamba-3 passes on the state, the cumulated angle, and the key and value of the last token. Two facts make this
simpler. Only differences of angles matter, so the state is turned back by the last token's angle, and the next scan
counts its angles from 0. And only the product of key and value matters: the write that the next token adds a share of.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ablate.kernels.errors import ShapeError
from ablate.kernels.mamba3_mimo.inputs import ScanInputs
from ablate.kernels.mamba3_mimo.operands import psiv, rotated


class ScanState(NamedTuple):
    """State after the last tokens, per row.

    Raw angles count from the last token, so the next scan starts its own at 0. Cumulated angles count from 0.
    """

    state: Tensor
    """S after the last token [B,H,N,P], float32 (float64 if the scan runs in float64)."""
    write: Tensor | None = None
    """Write of the last token, the sum over ranks of k~ x^T [B,H,N,P], dtype of `state`. The next token of the document
    adds (1 - sigmoid(trap)) dt of it. None: zero."""
    segment_ids: Tensor | None = None
    """[B] document id of the last token. A row that continues with another id starts from zero. None: rows continue
    the same document."""

    def detached(self) -> "ScanState":
        """Return the state without gradients, to truncate backpropagation through time."""
        return ScanState(self.state.detach(), None if self.write is None else self.write.detach(), self.segment_ids)


def entered(inputs: ScanInputs, before: ScanState) -> ScanInputs:
    """Return the inputs of rows that continue from `before`. Raises ShapeError if they do not fit together."""
    _check(inputs, before)
    acc = inputs.accumulate_dtype
    state_BHNP = before.state.to(acc)
    if before.write is not None:
        look_BH = torch.sigmoid(-inputs.trap[:, :, 0].to(acc)) * inputs.dt[:, :, 0].to(acc)
        state_BHNP = state_BHNP + look_BH[..., None, None] * before.write.to(acc)
    if before.segment_ids is not None and inputs.segment_ids is not None:
        continues_B = inputs.segment_ids[:, 0] == before.segment_ids
        state_BHNP = state_BHNP.where(continues_B.view(-1, 1, 1, 1), 0)
    return replace(inputs, entering=state_BHNP)


def left_behind(inputs: ScanInputs, state_BHNP: Tensor) -> ScanState:
    """Return the ScanState of a scan of `inputs` with the final state `state_BHNP`."""
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
        raise ShapeError("initial_state and the inputs' entering are both present; allowed: one of them")
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
