"""Causal self-attention with rotary positions, closed at document boundaries.

Legend: B batch, S sequence, D d_model, H heads, E head width. Positions run over the whole row; they are not reset
per document because rotary scores depend on differences only.
"""

import torch
from torch import Tensor, nn

from kernels import facts
from model.attention_backends import ATTEND
from model.config import HybridConfig
from model.facts import ModelFact
from model.layers import Linear


class CausalAttention(nn.Module):
    """Multi-head attention of a token over itself and the earlier tokens of its document."""

    def __init__(self, config: HybridConfig, *, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.backend = config.attention.backend
        self.num_heads, self.rope_theta = config.attention.num_heads, config.attention.rope_theta
        self.qkv_proj = Linear(config.d_model, 3 * config.d_model, compute_dtype=compute_dtype)
        self.out_proj = Linear(config.d_model, config.d_model, compute_dtype=compute_dtype)

    def forward(self, x_BSD: Tensor, segment_ids_BS: Tensor) -> Tensor:
        """Return the attended tokens [B,S,D]. Raises KernelUnsupported when the backend cannot run here."""
        projected = self.qkv_proj(x_BSD)
        heads = projected.view(*projected.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q_BHSE, k_BHSE, v_BHSE = heads.unbind(0)
        _record_implementation(self.backend)
        attended_BHSE = ATTEND[self.backend](
            rotate_positions(q_BHSE, self.rope_theta),
            rotate_positions(k_BHSE, self.rope_theta),
            v_BHSE,
            segment_ids_BS,
        )
        mixed: Tensor = self.out_proj(attended_BHSE.transpose(1, 2).flatten(2))
        return mixed


def rotate_positions(x_BHSE: Tensor, theta: float) -> Tensor:
    """Turn the pairs (j, E/2 + j) of every token by position * theta^(-2j/E), in float32."""
    length, half = x_BHSE.shape[2], x_BHSE.shape[3] // 2
    exponent = torch.arange(half, device=x_BHSE.device, dtype=torch.float32) / half
    position = torch.arange(length, device=x_BHSE.device, dtype=torch.float32)
    angle_SJ = position.unsqueeze(1) * theta**-exponent
    left, right = x_BHSE[..., :half].float(), x_BHSE[..., half:].float()
    cos, sin = angle_SJ.cos(), angle_SJ.sin()
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1).to(x_BHSE.dtype)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _record_implementation(backend: str) -> None:
    facts.record(ModelFact.ATTENTION, backend)
