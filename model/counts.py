"""Model FLOPs of one training step: what the mathematics needs, not what an implementation spends. Torch-free.

Rules: a multiply-add is two FLOPs; the backward pass is twice the forward one; nothing recomputed is counted.
Attention counts the full S x S score matrix, as is customary, although the causal half would do. The scan counts the
least that any schedule can do, one state write and one state read per rank, R * 4NP per token and head; the
chunk-parallel form spends R * [4NP + 2M(N + P)] with M = C * R, which would reward larger chunks with a higher rate.
Elementwise work, norms and the embedding lookup are not counted.
"""

from collections.abc import Callable

from model.config import HybridConfig, TrainConfig


def num_parameters(model: HybridConfig) -> int:
    """Return the trainable parameters: blocks with a norm each, embedding, head and the final norm."""
    blocks = sum(BLOCK_PARAMETERS[letter](model) + model.d_model for letter in model.pattern)
    return blocks + 2 * model.vocab_size * model.d_model + model.d_model


def mixer_parameters(model: HybridConfig) -> int:
    """Return the parameters of one Mamba-3 mixer: projections, two norms, two biases, psi, zeta and phi, dt and D."""
    mamba, heads = model.mamba, model.num_value_heads
    projections = model.d_model * (sum(model.mixer_widths) + model.d_inner)
    per_rank = 2 * mamba.d_state + 3 * mamba.headdim
    return projections + 2 * mamba.d_state + heads * (mamba.mimo_rank * per_rank + 2)


def attention_parameters(model: HybridConfig) -> int:
    """Return the parameters of one attention block: q, k, v and the output."""
    return 4 * model.d_model**2


def mlp_parameters(model: HybridConfig) -> int:
    """Return the parameters of one gated MLP: two matrices in, one out."""
    return 3 * model.d_model * model.mlp_width


BLOCK_PARAMETERS: dict[str, Callable[[HybridConfig], int]] = {
    "M": mixer_parameters,
    "A": attention_parameters,
    "F": mlp_parameters,
}
"""Parameters of every letter of a pattern, its norm apart."""


BACKWARD_FACTOR = 3
"""Forward plus backward, in units of the forward pass."""


def step_flops(config: TrainConfig) -> int:
    """Return the model FLOPs of one optimiser step, forward and backward over B * S tokens."""
    return BACKWARD_FACTOR * forward_flops_per_token(config.model, config.data.seq_len) * config.tokens_per_step


def forward_flops_per_token(model: HybridConfig, seq_len: int) -> int:
    """Return the FLOPs of a forward pass divided by its tokens, rows having `seq_len` tokens; the head included."""
    blocks = sum(BLOCK_FLOPS[letter](model, seq_len) for letter in model.pattern)
    return blocks + 2 * model.d_model * model.vocab_size


def mixer_flops(model: HybridConfig, seq_len: int) -> int:
    """Return the forward FLOPs per token of one Mamba-3 mixer, in rows of any length."""
    del seq_len
    return 2 * model.d_model * (sum(model.mixer_widths) + model.d_inner) + scan_flops(model)


def scan_flops(model: HybridConfig) -> int:
    """Return the least forward FLOPs per token of one scan: H * R * 4NP."""
    mamba = model.mamba
    return model.num_value_heads * mamba.mimo_rank * 4 * mamba.d_state * mamba.headdim


def attention_flops(model: HybridConfig, seq_len: int) -> int:
    """Return the forward FLOPs per token of one attention block."""
    return 2 * model.d_model * 4 * model.d_model + 4 * seq_len * model.d_model


def mlp_flops(model: HybridConfig, seq_len: int) -> int:
    """Return the forward FLOPs per token of one gated MLP, in rows of any length."""
    del seq_len
    return 2 * model.d_model * 3 * model.mlp_width


BLOCK_FLOPS: dict[str, Callable[[HybridConfig, int], int]] = {
    "M": mixer_flops,
    "A": attention_flops,
    "F": mlp_flops,
}
"""Forward FLOPs per token of every letter of a pattern string, from the model and the tokens of a row."""
