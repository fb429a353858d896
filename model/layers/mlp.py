"""Gated MLP (SwiGLU). Legend: B batch, S sequence, D d_model, F hidden width."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.config import HybridConfig
from model.layers.linear import Linear


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one matmul."""

    def __init__(self, config: HybridConfig, *, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.up_proj = Linear(config.d_model, 2 * config.mlp_width, compute_dtype=compute_dtype)
        self.out_proj = Linear(config.mlp_width, config.d_model, compute_dtype=compute_dtype)

    def forward(self, x_BSD: Tensor, segment_ids_BS: Tensor) -> Tensor:
        """Return [B,S,D]; every token by itself, so `segment_ids_BS` is not read."""
        del segment_ids_BS
        gate_BSF, up_BSF = self.up_proj(x_BSD).chunk(2, dim=-1)
        mixed: Tensor = self.out_proj(functional.silu(gate_BSF) * up_BSF)
        return mixed
