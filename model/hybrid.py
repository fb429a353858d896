"""The hybrid language model: embedding, residual blocks laid out by a pattern string, final norm, untied head.

Legend: B batch, S sequence, D d_model. The residual stream is float32 whatever the compute dtype. Parameters are
left uninitialised here; model.init fills every one of them.
"""

import torch
from torch import Tensor, nn

from model.attention import CausalAttention
from model.config import HybridConfig
from model.layers import Linear, RMSNorm
from model.mamba3 import Mamba3
from model.mlp import GatedMLP

MIXERS: dict[str, type[Mamba3] | type[CausalAttention] | type[GatedMLP]] = {
    "M": Mamba3,
    "A": CausalAttention,
    "F": GatedMLP,
}
"""Module of every letter of a pattern string."""


class ResidualBlock(nn.Module):
    """x + mixer(norm(x))."""

    def __init__(self, letter: str, config: HybridConfig, *, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = RMSNorm(config.d_model)
        self.mixer = MIXERS[letter](config, compute_dtype=compute_dtype)

    def forward(self, x_BSD: Tensor, segment_ids_BS: Tensor) -> Tensor:
        """Return the residual stream after this block, float32."""
        updated: Tensor = x_BSD + self.mixer(self.norm(x_BSD), segment_ids_BS)
        return updated


class Hybrid(nn.Module):
    """A stack of residual blocks over packed rows of documents."""

    def __init__(self, config: HybridConfig, *, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.d_model, dtype=torch.float32))
        self.blocks = nn.ModuleList(
            ResidualBlock(letter, config, compute_dtype=compute_dtype) for letter in config.pattern
        )
        self.final_norm = RMSNorm(config.d_model)
        self.lm_head = Linear(config.d_model, config.vocab_size, compute_dtype=compute_dtype)

    def forward(self, tokens_BS: Tensor, segment_ids_BS: Tensor) -> Tensor:
        """Return the hidden states [B,S,D] after the final norm, in the compute dtype.

        `tokens_BS` int64 ids; `segment_ids_BS` int64, constant over a document. The head is not applied: the loss
        does it (model.loss), so that the logits of all tokens need not exist at once.
        """
        x_BSD = nn.functional.embedding(tokens_BS, self.embedding)
        for block in self.blocks:
            x_BSD = block(x_BSD, segment_ids_BS)
        hidden: Tensor = self.final_norm(x_BSD).to(self.compute_dtype)
        return hidden
