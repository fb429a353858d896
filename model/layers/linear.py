"""Linear map, norms and gated MLP with explicit dtypes. The model uses no autocast.

Weights are float32 masters. A linear map casts both operands to `compute_dtype` and returns that dtype. Norms, residual
sums, decays and step sizes stay float32. Legend: B batch, S sequence, D d_model, F hidden width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.config import HybridConfig, NormKind

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


class LayerNorm(RMSNorm):
    """Subtract the mean of the last axis and divide by its standard deviation, times a learned weight, without bias."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x as float32."""
        return functional.layer_norm(x.float(), self.weight.shape, self.weight, eps=NORM_EPS)


NORMS: dict[NormKind, type[RMSNorm]] = {"rms": RMSNorm, "layer": LayerNorm}
"""Norms of the residual stream by name."""


class GatedMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), with gate and up in one matmul."""

    def __init__(self, config: HybridConfig, *, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.up_proj = Linear(config.d_model, 2 * config.mlp_width, compute_dtype=compute_dtype)
        self.out_proj = Linear(config.mlp_width, config.d_model, compute_dtype=compute_dtype)

    def forward(self, x_BSD: Tensor, segment_ids_BS: Tensor) -> Tensor:
        """Return [B,S,D]. Tokens are independent, so `segment_ids_BS` is unused."""
        del segment_ids_BS
        gate_BSF, up_BSF = self.up_proj(x_BSD).chunk(2, dim=-1)
        mixed: Tensor = self.out_proj(functional.silu(gate_BSF) * up_BSF)
        return mixed
