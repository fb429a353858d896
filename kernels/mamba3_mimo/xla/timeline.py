"""Documents, weights and angles of every token for the scan on XLA, in float32 or wider.

All shapes are static. Documents are values of a tensor and never shapes or branches: comparisons of running document
numbers find the boundaries. Long sums are not written as matrix products, which a TPU rounds to bfloat16. Shape
suffixes: see inputs.py; T tokens, a multiple of C.
"""

import math
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ablate.kernels.mamba3_mimo.inputs import ScanInputs


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Values per token, padded to whole chunks. Padding decays nothing and writes nothing."""

    adt_BHT: Tensor
    """Log decay of each step."""
    gamma_BHT: Tensor
    """Weight of a token's write at its own step, sigmoid(trap) * dt."""
    scale_BHT: Tensor
    """Weight of a token's write for all later tokens: gamma plus the addition of the next step."""
    angle_BHTA: Tensor
    """Cumulated rotary angles in [0, 2 pi), counted from the start of the document."""
    run_BT: Tensor
    """Number of the token's document within its row, int64."""

    AXES: ClassVar = (2, 2, 2, 2, 1)
    """Time axis of every field."""

    @classmethod
    def of(cls, tensors: tuple[Tensor, ...]) -> "Timeline":
        """Return the timeline with these fields in order."""
        return cls(**dict(zip((field.name for field in fields(cls)), tensors, strict=True)))

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the fields in order."""
        return self.adt_BHT, self.gamma_BHT, self.scale_BHT, self.angle_BHTA, self.run_BT


def timeline(inputs: ScanInputs, chunk_size: int) -> Timeline:
    """Return the timeline of `inputs`, padded to a multiple of `chunk_size`."""
    acc = inputs.accumulate_dtype
    dt_BHS, mix_BHS = inputs.dt.to(acc), torch.sigmoid(inputs.trap.to(acc))
    starts_BS = _starts(inputs)
    gamma_BHS, look_BHS = mix_BHS * dt_BHS, (1 - mix_BHS) * dt_BHS
    sigma_BHS = functional.pad((look_BHS * ~starts_BS.unsqueeze(1))[..., 1:], (0, 1))
    run_BT = pad_time(starts_BS.to(torch.int64), chunk_size, axis=1).cumsum(1)
    return Timeline(
        adt_BHT=pad_time(inputs.adt.to(acc), chunk_size, axis=2),
        gamma_BHT=pad_time(gamma_BHS, chunk_size, axis=2),
        scale_BHT=pad_time(gamma_BHS + sigma_BHS, chunk_size, axis=2),
        angle_BHTA=_angles(inputs, run_BT, chunk_size),
        run_BT=run_BT,
    )


def split(t: Tensor, axis: int, *sizes: int) -> Tensor:
    """Return `t` with `axis` divided into axes of `sizes`, -1 for the rest."""
    divided: Tensor = t.unflatten(axis, sizes)  # type: ignore[no-untyped-call]
    return divided


def pad_time(t: Tensor, chunk_size: int, *, axis: int) -> Tensor:
    """Append zeros along `axis` up to a multiple of `chunk_size`."""
    missing = -t.shape[axis] % chunk_size
    return functional.pad(t, (0, 0) * (t.dim() - 1 - axis) + (0, missing)) if missing else t


def _starts(inputs: ScanInputs) -> Tensor:
    """Return [B,S] bool: the token's id differs from its left neighbour's; False for a row's first token."""
    if inputs.segment_ids is None:
        return torch.zeros(inputs.v.shape[:2], dtype=torch.bool, device=inputs.v.device)
    ids_BS = inputs.segment_ids
    return functional.pad(ids_BS[:, 1:] != ids_BS[:, :-1], (1, 0))


def _angles(inputs: ScanInputs, run_BT: Tensor, chunk_size: int) -> Tensor:
    """Return the cumulated angles [B,H,T,A], counted from the start of the document.

    They are summed within a chunk over tokens of the same document. The first document of a chunk adds its sum from
    the chunks before. The sums are masked elementwise products, because matrix products would round the angles.
    """
    acc = inputs.accumulate_dtype
    raw_BHTA = pad_time(inputs.angles.transpose(1, 2).to(acc), chunk_size, axis=2)
    if inputs.angles_cumulated:
        return torch.remainder(raw_BHTA, math.tau)
    dt_BHT1 = pad_time(inputs.dt.to(acc), chunk_size, axis=2).unsqueeze(-1)
    step_BHTA = math.pi * torch.tanh(raw_BHTA) * dt_BHT1
    run_B1KC = split(run_BT, 1, -1, chunk_size).unsqueeze(1)
    earlier_B1KCC = (run_B1KC.unsqueeze(-1) == run_B1KC.unsqueeze(-2)).tril()
    inside_BHKCA = _masked_sum(earlier_B1KCC, split(step_BHTA, 2, -1, chunk_size))
    total_BHKA = torch.remainder(inside_BHKCA[:, :, :, -1], math.tau)
    before_BHKA = _masked_sum(_continues(run_B1KC), total_BHKA)
    first_B1KC1 = (run_B1KC == run_B1KC[..., :1]).unsqueeze(-1)
    return torch.remainder(inside_BHKCA + before_BHKA.unsqueeze(3) * first_B1KC1, math.tau).flatten(2, 3)


def _masked_sum(mask_X: Tensor, t_XA: Tensor) -> Tensor:
    """Return [...,X,A]: row t is the sum of the rows u of `t_XA` [...,X,A] with `mask_X` [...,X,X] (t, u) true."""
    return (mask_X.unsqueeze(-1) * t_XA.unsqueeze(-3)).sum(-2)


def _continues(run_B1KC: Tensor) -> Tensor:
    """Return [B,1,K,K] bool: the document that ends chunk u reaches the first token of the later chunk k."""
    return (run_B1KC[..., :1] == run_B1KC[..., -1].unsqueeze(-2)).tril(-1)
