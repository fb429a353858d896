"""Heads too wide for the kernels, run as two heads of half the width.

The columns of a state are independent: column p depends on the values, the output gate and the weights of column p, and
on tensors that the whole head shares. So a head of width P equals two heads of width P / 2 with the same q and k.
Shared values are computed twice, and their gradient is the sum of both.
"""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ablate.kernels.mamba3_mimo.cuda.host.refusals import CHUNK_SIZES, HEAD_WIDTHS, refusal
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant
from ablate.kernels.mamba3_mimo.inputs import ScanInputs

WIDE = {"v": -2, "z": -2, "psi": 0, "zeta": 0, "phi": 0, "entering": 1}
"""Tensors with values per column of a head, on the last axis -> their axis of heads."""
SHARED = {"q_bias": 0, "k_bias": 0, "D": 0, "adt": 1, "dt": 1, "trap": 1, "angles": 2}
"""Tensors that all columns of a head share -> their axis of heads."""


def must_split(shape: ScanShape) -> bool:
    """Return whether no chunk size fits heads of this width, but one fits half of it.

    Only the model's shape counts and no switch, because two arms of an ablation never differ in the shape. Sizes that
    torch.compile leaves open while it traces are used with their current values.
    """
    sizes = ScanShape(
        B=1, S=256, H=1, G=1, N=int(shape.N), P=int(shape.P), R=int(shape.R), A=int(shape.A), L=256,
        gated=shape.gated, reduced=shape.reduced, cumulated=shape.cumulated,
    )  # fmt: skip
    wide, narrow = sizes.P, sizes.P // 2
    return {wide, narrow} <= set(HEAD_WIDTHS) and not _fits(sizes) and _fits(replace(sizes, P=narrow))


@lru_cache(maxsize=256)
def _fits(sizes: ScanShape) -> bool:
    return any(refusal(Variant(chunk_size=size), replace(sizes, C=size)) is None for size in CHUNK_SIZES)


def split(inputs: ScanInputs) -> ScanInputs:
    """Return the same scan with twice the heads, of half the width."""
    return inputs.with_tensors(tuple(_split(name, getattr(inputs, name), inputs.num_heads) for name in inputs.names))


def _split(name: str, tensor: Tensor, heads: int) -> Tensor:
    if name in WIDE:
        return split_width(tensor, WIDE[name])
    axis = SHARED.get(name)
    if axis is None or tensor.shape[axis] != heads:  # q, k, and angles that all heads share
        return tensor
    return tensor.repeat_interleave(2, axis)


def split_width(tensor: Tensor, heads_at: int = -2) -> Tensor:
    """Return H heads of width P, the last axis, as 2 H heads of width P / 2."""
    return torch.unflatten(tensor.movedim(heads_at, -2), -1, (2, -1)).flatten(-3, -2).movedim(-2, heads_at)


def joined_width(tensor: Tensor, heads_at: int = -2) -> Tensor:
    """Return 2 H heads of width P / 2, the last axis, as H heads of width P."""
    return torch.unflatten(tensor.movedim(heads_at, -2), -2, (-1, 2)).flatten(-2).movedim(-2, heads_at)


def joined_gradient(name: str, grad: Tensor, heads: int) -> Tensor:
    """Return the gradient of the unsplit tensor. `heads` is the number of heads of the split scan."""
    if name in WIDE:
        return joined_width(grad, WIDE[name])
    axis = SHARED.get(name)
    if axis is None or grad.shape[axis] != heads:
        return grad
    return torch.unflatten(grad, axis, (-1, 2)).sum(axis + 1)
