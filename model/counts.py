"""Parameters and model FLOPs of a configuration. Torch-free. `ablate.model.blocks` has those of each kind of blocks.

Model FLOPs count the work of the mathematics, not of an implementation:

- A multiply-add is two FLOPs. The backward pass is twice the forward pass. Recomputation does not count.
- Attention counts the full S x S score matrix, as is customary (Chowdhery et al. 2022, PaLM, appendix B), although the
  causal half would suffice. So the rate of a model with attention over packed documents is too high, by a factor of
  S / (mean document) in the scores; `document_flops` counts the pairs of tokens that attend to each other. With a
  window W each token counts min(S, W) scores. Heads of keys and values that queries share save no scores.
- The scan counts the least work of any schedule: one state write and one state read per rank, R * 4NP per token and
  head. The chunk-parallel form spends R * [4NP + 2M(N + P)] with M = C * R, which would reward larger chunks with a
  higher rate.
- A mixture of experts counts the router, the experts of a token and the shared one.
- Elementwise work, norms and the embedding lookup do not count.
"""

from ablate.model.blocks import BLOCKS, HybridConfig, score_flops
from ablate.model.config import TrainConfig

BACKWARD_FACTOR = 3
"""Forward plus backward pass, in units of the forward pass."""


def num_parameters(model: HybridConfig) -> int:
    """Return the trainable parameters: blocks with a norm each, embedding, head and the final norm."""
    blocks = sum(BLOCKS[letter].parameters(model) + model.d_model for letter in model.pattern)
    return blocks + 2 * model.vocab_size * model.d_model + model.d_model


def active_parameters(model: HybridConfig) -> int:
    """Return the parameters that one token uses: all but those of the experts that it does not go to."""
    return num_parameters(model) - sum(BLOCKS[letter].idle(model) for letter in model.pattern)


def step_flops(config: TrainConfig) -> int:
    """Return the model FLOPs of one optimiser step, forward and backward over B * S tokens."""
    return BACKWARD_FACTOR * forward_flops_per_token(config.model, config.data.seq_len) * config.tokens_per_step


def document_flops(config: TrainConfig, pairs: float) -> float:
    """Return the FLOPs of one optimiser step whose attention sees `pairs` of tokens.

    Without a window that is the sum of L (L + 1) / 2 over the lengths L of the documents of the batch, or of its rows
    where documents are joined; see `ablate.model.data.packing.visible_pairs`.
    """
    model, tokens = config.model, config.tokens_per_step
    layers = model.pattern.count("A")
    scores = layers * score_flops(model, config.data.seq_len) * tokens
    forward = forward_flops_per_token(model, config.data.seq_len) * tokens - scores
    return BACKWARD_FACTOR * (forward + layers * 4 * model.d_model * pairs)


def forward_flops_per_token(model: HybridConfig, seq_len: int) -> int:
    """Return the FLOPs per token of a forward pass over rows of `seq_len` tokens, including the head."""
    blocks = sum(BLOCKS[letter].flops(model, seq_len) for letter in model.pattern)
    return blocks + 2 * model.d_model * model.vocab_size
