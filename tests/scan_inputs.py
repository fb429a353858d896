"""Random scan inputs, and the two error measures that tests of scans take.

Two errors are taken because one hides the other: over the whole tensor, and over each time row by itself. A wrong
last row of every chunk hardly moves the first and is obvious in the second.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ablate.kernels.mamba3_mimo import ScanInputs

TIME_AXIS = {"q": 1, "k": 1, "v": 1, "z": 1, "adt": 2, "dt": 2, "trap": 2, "angles": 1, "out": 1}
"""Axis of time of every tensor that has one."""


@dataclass(frozen=True, kw_only=True)
class ScanSizes:
    """Sizes of one scan, with the letters of kernels/mamba3_mimo/inputs.py."""

    batch: int = 2
    length: int = 37
    heads: int = 4
    groups: int = 2
    state: int = 16
    width: int = 8
    ranks: int = 4
    rope_fraction: float = 0.5

    @property
    def angles(self) -> int:
        """A, rotary angles per head."""
        return int(self.state * self.rope_fraction) // 2


def random_inputs(shape: ScanSizes, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> ScanInputs:
    """Return inputs of realistic size: decays in (0, 1), step sizes around 0.3, half of the angles negative."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=gen)

    b, s, h, r, p, n = shape.batch, shape.length, shape.heads, shape.ranks, shape.width, shape.state
    dt = torch.nn.functional.softplus(normal(b, h, s) - 1)
    adt = -dt * torch.nn.functional.softplus(normal(b, h, s))
    direction = (b, s, r, shape.groups, n)
    return ScanInputs(
        q=normal(*direction).to(dtype),
        k=normal(*direction).to(dtype),
        v=normal(b, s, h, p).to(dtype),
        z=normal(b, s, h, p).to(dtype),
        q_bias=normal(h, r, n),
        k_bias=normal(h, r, n),
        psi=normal(h, r, p) / r,
        zeta=normal(h, r, p),
        phi=normal(h, r, p) / r,
        D=normal(h),
        adt=adt,
        dt=dt,
        trap=normal(b, h, s),
        angles=normal(b, s, h, shape.angles),
    )


def global_error(actual: Tensor, expected: Tensor) -> float:
    """Return |actual - expected| / |expected|, Euclidean over the whole tensor, in float64."""
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-12))


def worst_row_error(actual: Tensor, expected: Tensor, *, time_axis: int, floor: float = 1e-2) -> float:
    """Return the largest relative Euclidean error of a time row, batch rows apart.

    Rows smaller than `floor` times the largest row are measured against that size, not against their own.
    """
    difference, scale = (
        torch.movedim(t, time_axis, 1).flatten(2).norm(dim=2)
        for t in (actual.double() - expected.double(), expected.double())
    )
    return float((difference / scale.clamp_min(float(scale.max()) * floor).clamp_min(1e-12)).max())
