"""The kinds of residual blocks, and parameters and model FLOPs of a configuration. Torch-free.

Model FLOPs count the work of the mathematics, not of an implementation:

- A multiply-add is two FLOPs. The backward pass is twice the forward pass. Recomputation does not count.
- Attention counts the full S x S score matrix, as is customary (Chowdhery et al. 2022, PaLM, appendix B), although the
  causal half would suffice. So the rate of a model with attention over packed documents is too high, by a factor of
  S / (mean document) in the scores; `document_flops` counts the pairs of tokens that attend to each other.
- The scan counts the least work of any schedule: one state write and one state read per rank, R * 4NP per token and
  head. The chunk-parallel form spends R * [4NP + 2M(N + P)] with M = C * R, which would reward larger chunks with a
  higher rate.
- Elementwise work, norms and the embedding lookup do not count.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ablate.model.config import HybridConfig, TrainConfig


@dataclass(frozen=True, kw_only=True)
class BlockKind:
    """What the rest asks of a kind of blocks."""

    module: str
    """`module:Class` of its mixer, which takes the configuration and `compute_dtype`."""
    parameters: Callable[[HybridConfig], int]
    """Parameters of its block without the norm."""
    flops: Callable[[HybridConfig, int], int]
    """Forward FLOPs per token, from (model, tokens of a row)."""
    fields: tuple[str, ...] = ()
    """Fields of TrainConfig that have an effect only in a model with such blocks."""


def mixer_parameters(model: HybridConfig) -> int:
    """Return the parameters of one Mamba-3 mixer: projections, two norms, two biases, psi, zeta, phi, dt and D."""
    mamba, heads = model.mamba, model.num_value_heads
    per_rank = 2 * mamba.d_state + 3 * mamba.headdim
    return _mixer_matrices(model) + 2 * mamba.d_state + heads * (mamba.mimo_rank * per_rank + 2)


def attention_parameters(model: HybridConfig) -> int:
    """Return the parameters of one attention block: q, k, v and the output."""
    return 4 * model.d_model**2


def mlp_parameters(model: HybridConfig) -> int:
    """Return the parameters of one gated MLP: two matrices in, one out."""
    return 3 * model.d_model * model.mlp_width


def mixer_flops(model: HybridConfig, seq_len: int) -> int:
    """Return the forward FLOPs per token of one Mamba-3 mixer, independent of the row length."""
    del seq_len
    return 2 * _mixer_matrices(model) + scan_flops(model)


def scan_flops(model: HybridConfig) -> int:
    """Return the least forward FLOPs per token of one scan: H * R * 4NP."""
    mamba = model.mamba
    return model.num_value_heads * mamba.mimo_rank * 4 * mamba.d_state * mamba.headdim


def attention_flops(model: HybridConfig, seq_len: int) -> int:
    """Return the forward FLOPs per token of one attention block."""
    return 2 * attention_parameters(model) + 4 * seq_len * model.d_model


def mlp_flops(model: HybridConfig, seq_len: int) -> int:
    """Return the forward FLOPs per token of one gated MLP, independent of the row length."""
    del seq_len
    return 2 * mlp_parameters(model)


def _mixer_matrices(model: HybridConfig) -> int:
    return model.d_model * (sum(model.mixer_widths) + model.d_inner)


BLOCKS: dict[str, BlockKind] = {
    "M": BlockKind(
        module="ablate.model.layers.mamba3:Mamba3",
        parameters=mixer_parameters,
        flops=mixer_flops,
        fields=("model.mamba", "model.scan"),
    ),
    "A": BlockKind(
        module="ablate.model.layers.attention:CausalAttention",
        parameters=attention_parameters,
        flops=attention_flops,
        fields=("model.attention",),
    ),
    "F": BlockKind(
        module="ablate.model.layers.linear:GatedMLP",
        parameters=mlp_parameters,
        flops=mlp_flops,
        fields=("model.mlp_ratio",),
    ),
}
"""By letter; `ablate.model.config.BLOCK_KINDS` names them."""


BACKWARD_FACTOR = 3
"""Forward plus backward pass, in units of the forward pass."""


def num_parameters(model: HybridConfig) -> int:
    """Return the trainable parameters: blocks with a norm each, embedding, head and the final norm."""
    blocks = sum(BLOCKS[letter].parameters(model) + model.d_model for letter in model.pattern)
    return blocks + 2 * model.vocab_size * model.d_model + model.d_model


def step_flops(config: TrainConfig) -> int:
    """Return the model FLOPs of one optimiser step, forward and backward over B * S tokens."""
    return BACKWARD_FACTOR * forward_flops_per_token(config.model, config.data.seq_len) * config.tokens_per_step


def document_flops(config: TrainConfig, pairs: float) -> float:
    """Return the FLOPs of one optimiser step whose attention sees `pairs` of tokens: Sum of L (L + 1) / 2.

    L are the lengths of the documents of the batch, or of its rows where documents are joined.
    """
    model, tokens = config.model, config.tokens_per_step
    layers = model.pattern.count("A")
    scores = layers * 4 * config.data.seq_len * model.d_model * tokens
    forward = forward_flops_per_token(model, config.data.seq_len) * tokens - scores
    return BACKWARD_FACTOR * (forward + layers * 4 * model.d_model * pairs)


def forward_flops_per_token(model: HybridConfig, seq_len: int) -> int:
    """Return the FLOPs per token of a forward pass over rows of `seq_len` tokens, including the head."""
    blocks = sum(BLOCKS[letter].flops(model, seq_len) for letter in model.pattern)
    return blocks + 2 * model.d_model * model.vocab_size
