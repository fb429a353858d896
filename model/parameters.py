"""How many parameters a model has, from its configuration. Torch-free."""

from collections.abc import Callable

from model.config import HybridConfig


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
