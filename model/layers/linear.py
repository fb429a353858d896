"""Linear map and RMS norm with explicit dtypes. There is no autocast anywhere in the model.

Weights are float32 masters. A linear map casts its two operands to `compute_dtype` and returns that dtype; norms,
residual sums, decays and step sizes stay float32.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

NORM_EPS = 1e-5


class Linear(nn.Module):
    """Bias-free linear map of the last axis."""

    def __init__(self, in_features: int, out_features: int, *, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=torch.float32))
        self.compute_dtype = compute_dtype

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight^T in `compute_dtype`."""
        return functional.linear(x.to(self.compute_dtype), self.weight.to(self.compute_dtype))


class RMSNorm(nn.Module):
    """Divide by the root mean square of the last axis, times a learned weight; float32 inside and out."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x as float32."""
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, NORM_EPS)
