"""Tensors of one scan, checked on construction.

Shape suffixes in this folder: B batch, S sequence, H value heads, G groups sharing q and k (head h reads group
h // (H / G)), N state size, P head width, R MIMO rank, A rotary angles (half of the rotated width), C tokens per
chunk, K chunks, M = C * R rows of one chunk in (time, rank) order.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ablate.kernels.errors import ShapeError

DIFFERENTIABLE = (
    "q", "k", "v", "z", "q_bias", "k_bias", "psi", "zeta", "phi", "D", "adt", "dt", "trap", "angles", "entering",
)  # fmt: skip
"""The fifteen tensors that can receive a gradient, in the order of `ScanInputs.tensors()`."""
OPTIONAL = ("z", "zeta", "phi", "D", "entering")
"""Tensors that may be None; z and zeta only together."""


@dataclass(frozen=True, kw_only=True)
class ScanInputs:
    """Arguments of the Mamba-3 MIMO scan. q, k, v and z share one dtype, the dtype of the operation."""

    q: Tensor
    """[B,S,R,G,N] reading directions, without bias and rotation."""
    k: Tensor
    """[B,S,R,G,N] writing directions, without bias and rotation."""
    v: Tensor
    """[B,S,H,P] values."""
    z: Tensor | None = None
    """[B,S,H,P] output gate before silu. None together with zeta: no output gate."""
    q_bias: Tensor
    """[H,R,N]."""
    k_bias: Tensor
    """[H,R,N]."""
    psi: Tensor
    """[H,R,P] expands one value per head to R."""
    zeta: Tensor | None = None
    """[H,R,P] expands the output gate to R."""
    phi: Tensor | None = None
    """[H,R,P] contracts R outputs to one. None: the output keeps its R ranks, [B,S,R,H,P]."""
    D: Tensor | None = None
    """[H] skip weight. None: no skip."""
    adt: Tensor
    """[B,H,S] log decay of each step, <= 0."""
    dt: Tensor
    """[B,H,S] step size, > 0. At exactly 0, the gradient of dt is wrong in lane cuda: it lacks what the token would
    write, because the kernels divide by the weight of the write."""
    trap: Tensor
    """[B,H,S] trapezoid mix before the sigmoid."""
    angles: Tensor
    """[B,S,H,A] raw angles, or [B,S,1,A] shared by all heads. With `angles_cumulated`: cumulated, in radians."""
    entering: Tensor | None = None
    """[B,H,N,P] state before the first token, including that token's share of the previous write. `mamba3_mimo` makes
    it from a ScanState. None: zero."""
    segment_ids: Tensor | None = None
    """[B,S] integers; the scan restarts at every change. None: every row is one document. Lane reference keeps a NaN or
    infinity in its document. In lanes cuda and xla it reaches other documents of its row."""
    angles_cumulated: bool = False
    """Whether `angles` already holds the running sum over time."""

    def __post_init__(self) -> None:
        if (self.z is None) != (self.zeta is None):
            alone, missing = ("zeta", "z") if self.z is None else ("z", "zeta")
            raise ShapeError(f"{alone} is present without {missing}; allowed: both, or neither for no output gate")
        for name, expected in self._expected_shapes().items():
            tensor = getattr(self, name)
            shape = expected if tensor is None else tuple(tensor.shape)
            if shape != expected:
                raise ShapeError(f"{name} has shape {list(shape)}; expected {list(expected)}")
        if self.num_heads % self.num_groups:
            raise ShapeError(f"v has {self.num_heads} heads; allowed: a multiple of the {self.num_groups} groups of q")
        if self.angles.shape[-1] not in (self.state_size // 4, self.state_size // 2):
            raise ShapeError(f"angles has {self.angles.shape[-1]} angles; allowed: N/4 or N/2 with N={self.state_size}")
        self._check_dtypes()

    @classmethod
    def unchecked(cls, **fields: Any) -> "ScanInputs":
        """Return inputs made of `fields`, all of them, without a check. A check takes 10 us per pass."""
        inputs = cls.__new__(cls)
        vars(inputs).update(fields)
        return inputs

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        if self.q.dim() != 5 or self.v.dim() != 4 or self.angles.dim() != 4:
            raise ShapeError(
                f"q, v and angles have {self.q.dim()}, {self.v.dim()} and {self.angles.dim()} axes; "
                "expected 5 [B,S,R,G,N], 4 [B,S,H,P] and 4 [B,S,H,A]"
            )
        b, s, r, g, n = self.q.shape
        h, p = self.v.shape[2:]
        shapes: dict[str, tuple[int, ...]] = {"k": (b, s, r, g, n), "v": (b, s, h, p), "z": (b, s, h, p), "D": (h,)}
        shapes |= dict.fromkeys(("q_bias", "k_bias"), (h, r, n))
        shapes |= dict.fromkeys(("psi", "zeta", "phi"), (h, r, p))
        shapes |= dict.fromkeys(("adt", "dt", "trap"), (b, h, s)) | {"entering": (b, h, n, p)}
        shared = self.angles.shape[2] == 1 and not self.angles_cumulated
        shapes["angles"] = (b, s, 1 if shared else h, self.angles.shape[-1])
        if self.segment_ids is not None:
            shapes["segment_ids"] = (b, s)
        sizes = {"B": b, "S": s, "H": h, "G": g, "N": n, "P": p, "R": r}
        if 0 in sizes.values() or n % 4:
            listed = ", ".join(f"{letter}={size}" for letter, size in sizes.items())
            raise ShapeError(f"q and v have {listed}; allowed: all at least 1, N a multiple of 4")
        return shapes

    def _check_dtypes(self) -> None:
        dtypes = [tensor.dtype for tensor in (self.q, self.k, self.v, self.z) if tensor is not None]
        if len(set(dtypes)) > 1:
            raise ShapeError(f"q, k, v and z have dtypes {[str(dtype) for dtype in dtypes]}; expected one dtype")
        if self.segment_ids is not None and self.segment_ids.is_floating_point():
            raise ShapeError(f"segment_ids has dtype {self.segment_ids.dtype}; expected an integer dtype")

    @property
    def num_heads(self) -> int:
        """H."""
        return self.v.shape[2]

    @property
    def num_groups(self) -> int:
        """G."""
        return self.q.shape[3]

    @property
    def state_size(self) -> int:
        """N."""
        return self.q.shape[4]

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """Dtype of states and sums: float32, or float64 if the operation runs in float64."""
        return torch.promote_types(self.v.dtype, torch.float32)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the present differentiable tensors, in the order of `DIFFERENTIABLE`."""
        return tuple(name for name in DIFFERENTIABLE if getattr(self, name) is not None)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the present differentiable tensors, in the order of `names`."""
        return tuple(getattr(self, name) for name in self.names)

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> "ScanInputs":
        """Return a copy with other differentiable `tensors`, in the order of `names`."""
        changes: dict[str, Any] = dict(zip(self.names, tensors, strict=True))
        return replace(self, **changes)
