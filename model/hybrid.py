"""The hybrid language model: embedding, residual blocks by a pattern string, final norm, untied head.

Legend: B batch, S sequence, D d_model. The residual stream has the dtype `HybridConfig.residual`.

The modules leave their parameters uninitialised, and `build` fills all of them from one seed. Each parameter draws from
its own generator, seeded by the run's seed and the parameter's name. So two arms of an ablation that differ in one
block start with the same numbers everywhere else.
"""

import hashlib
import math
from collections.abc import Callable
from pkgutil import resolve_name

import torch
from torch import Tensor, nn

from ablate.kernels import facts
from ablate.model.blocks import BLOCKS
from ablate.model.config import HybridConfig, MambaConfig, TrainConfig
from ablate.model.facts import ModelFact
from ablate.model.layers.attention import CausalAttention, Rotary
from ablate.model.layers.layer_loops import LayerLoops
from ablate.model.layers.linear import Linear, residual_norm

EMBEDDING_STD = 0.02

_CONSTANTS = {"q_bias": 1.0, "k_bias": 1.0, "zeta": 1.0, "D": 1.0, "A_log": 0.0}
"""Mixer parameters with a constant start. psi and phi start at 1 / R, state_weight at the identity of each head."""


Layer = Callable[["ResidualBlock", Tensor, Tensor | None, Tensor, Rotary | None], tuple[Tensor, Tensor]]
"""`ResidualBlock.layer`, compiled or not."""


class ResidualBlock(nn.Module):
    """One layer between two residual sums: mixer(norm(x)).

    A block adds the output of the block before, not its own. So the sum and the norm that reads it are one kernel
    where the block is compiled, in the forward and in the backward pass.
    """

    def __init__(self, letter: str, config: HybridConfig, *, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = residual_norm(config, compute_dtype)
        self.mixer: nn.Module = resolve_name(BLOCKS[letter].module)(config, compute_dtype=compute_dtype)

    def forward(
        self,
        x_BSD: Tensor,
        update_BSD: Tensor | None,
        segment_ids_BS: Tensor,
        rotary: Rotary | None = None,
        layer: Layer | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return what `layer` returns, by default the method of that name. Hooks of this module run around it."""
        return (layer or ResidualBlock.layer)(self, x_BSD, update_BSD, segment_ids_BS, rotary)

    def layer(
        self, x_BSD: Tensor, update_BSD: Tensor | None, segment_ids_BS: Tensor, rotary: Rotary | None
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream before this block, in its dtype, and what this block adds to it.

        `update_BSD` is what the block before adds, None for the first one. Only attention takes `rotary`.
        """
        shared = (rotary,) if isinstance(self.mixer, CausalAttention) else ()
        x_BSD, normed_BSD = self.norm.of_sum(x_BSD, update_BSD)
        return x_BSD, self.mixer(normed_BSD, segment_ids_BS, *shared)


class Hybrid(nn.Module):
    """A stack of residual blocks over packed rows of documents."""

    def __init__(self, config: HybridConfig, *, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self._residual_dtype: torch.dtype = getattr(torch, config.residual)
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.d_model, dtype=torch.float32))
        self.blocks = nn.ModuleList(
            ResidualBlock(letter, config, compute_dtype=compute_dtype) for letter in config.pattern
        )
        self._layers = LayerLoops(self.blocks, config) if config.scan_layers else None
        self.final_norm = residual_norm(config, compute_dtype)
        self.lm_head = Linear(config.d_model, config.vocab_size, compute_dtype=compute_dtype)

    def forward(self, tokens_BS: Tensor, segment_ids_BS: Tensor, layer: Layer | None = None) -> Tensor:
        """Return the hidden states [B,S,D] after the final norm, in the compute dtype.

        `tokens_BS`: int64 ids. `segment_ids_BS`: int64, constant over a document. The loss (ablate.model.training.loss)
        applies the head, so the logits of all tokens need not exist at once. `layer` computes the blocks.
        """
        x_BSD = nn.functional.embedding(tokens_BS, self.embedding).to(self._residual_dtype)
        update_BSD: Tensor | None = None
        if self._layers is not None:
            x_BSD = self._layers(x_BSD, segment_ids_BS)
        else:
            rotary = self._rotary(tokens_BS)
            for block in self.blocks:
                x_BSD, update_BSD = block(x_BSD, update_BSD, segment_ids_BS, rotary, layer)
        x_BSD, hidden_BSD = self.final_norm.of_sum(x_BSD, update_BSD)
        hidden_BSD = hidden_BSD.to(self.compute_dtype)
        _record(x_BSD.dtype)
        return hidden_BSD

    def _rotary(self, tokens_BS: Tensor) -> Rotary | None:
        """Return the tables of all attention layers, which are equal; None without such a layer."""
        layers = (block.mixer for block in self.blocks if isinstance(block.mixer, CausalAttention))
        first = next(layers, None)
        return None if first is None else first.rotary_tables(tokens_BS.shape[1], tokens_BS.device)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _record(residual: torch.dtype) -> None:
    facts.record(ModelFact.RESIDUAL_DTYPE, str(residual).removeprefix("torch."))


def build(config: TrainConfig) -> Hybrid:
    """Return the initialised model of `config` on the CPU. Equal seeds give bit-equal parameters."""
    with torch.device("meta"):
        model = Hybrid(config.model, compute_dtype=getattr(torch, config.dtype))
    model.to_empty(device="cpu")
    initialise(model, seed=config.seed)
    return model


@torch.no_grad()
def initialise(model: Hybrid, *, seed: int) -> None:
    """Fill every parameter of `model` in place.

    Matrices are normal with variance 1 / fan-in. Output projections are further divided by sqrt(number of blocks), so
    the residual stream does not grow with depth. Embedding and head have standard deviation 0.02, so the first loss is
    close to ln(vocabulary).
    """
    for buffer in model.buffers():
        buffer.zero_()
    for name, parameter in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if leaf in ("psi", "phi"):
            parameter.fill_(1 / model.config.mamba.mimo_rank)
        elif leaf in _CONSTANTS:
            parameter.fill_(_CONSTANTS[leaf])
        elif leaf == "state_weight":
            parameter.copy_(torch.eye(parameter.shape[1]).expand_as(parameter))
        elif leaf == "dt_bias":
            _step_size_bias(parameter, model.config.mamba, _generator(seed, name))
        elif parameter.dim() == 1:
            parameter.fill_(1.0)  # norm weights
        else:
            parameter.normal_(std=_std(name, parameter, len(model.blocks)), generator=_generator(seed, name))


def _std(name: str, weight: nn.Parameter, num_blocks: int) -> float:
    if name in ("embedding", "lm_head.weight"):
        return EMBEDDING_STD
    depth = num_blocks if name.endswith("out_proj.weight") else 1
    return float((weight[0].numel() * depth) ** -0.5)


def _step_size_bias(bias_H: Tensor, mamba: MambaConfig, generator: torch.Generator) -> None:
    """Fill with the inverse softplus of step sizes drawn log-uniformly in [dt_min, dt_max]."""
    bias_H.uniform_(math.log(mamba.dt_min), math.log(mamba.dt_max), generator=generator)
    dt_H = bias_H.exp().clamp_min(mamba.dt_init_floor)
    bias_H.copy_(dt_H + torch.log(-torch.expm1(-dt_H)))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
