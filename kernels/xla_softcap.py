"""Forward attention kernel for TPUs (Pallas): causal, inside documents, with capped scores.

One program walks the blocks of keys for one block of queries and skips blocks above the diagonal. Scores are float32,
capped by cap * tanh(scores / cap) before the mask, and summed with a running maximum, so no S x S array exists. A
vector unit compares whole tiles, so document numbers are spread along the lanes for queries and along the sublanes for
keys. Legend: B batch, H heads, S sequence, E head width, Q and K rows of a block.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

BLOCK = 128
LANES, SUBLANES = 128, 8
MASKED = -0.7 * 3.4028235e38
"""Score of a masked pair: finite, so that a difference of two masked scores is 0 and not NaN."""


@lru_cache(maxsize=16)
def softcap_attention(cap: float, interpret: bool = False) -> Callable[..., Any]:
    """Return the JAX function (q, k, v [B,H,S,E], documents [B,S,LANES], documents [B,SUBLANES,S]) -> [B,H,S,E].

    q is already scaled. `cap` 0 caps nothing. S is a multiple of BLOCK. `interpret` runs the kernel without a TPU.
    """

    def run(q: Any, k: Any, v: Any, q_documents: Any, k_documents: Any) -> Any:
        import jax
        import jax.numpy as jnp
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        batch, heads, length, width = q.shape
        of_queries = pl.BlockSpec((1, 1, BLOCK, width), lambda b, h, i, j: (b, h, i, 0))
        of_keys = pl.BlockSpec((1, 1, BLOCK, width), lambda b, h, i, j: (b, h, j, 0))
        return pl.pallas_call(
            partial(_kernel, cap=cap),
            grid=(batch, heads, length // BLOCK, length // BLOCK),
            in_specs=[
                of_queries,
                of_keys,
                of_keys,
                pl.BlockSpec((1, BLOCK, LANES), lambda b, h, i, j: (b, i, 0)),
                pl.BlockSpec((1, SUBLANES, BLOCK), lambda b, h, i, j: (b, 0, j)),
            ],
            out_specs=of_queries,
            out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
            scratch_shapes=[
                pltpu.VMEM((BLOCK, LANES), jnp.float32),
                pltpu.VMEM((BLOCK, LANES), jnp.float32),
                pltpu.VMEM((BLOCK, width), jnp.float32),
            ],
            interpret=interpret,
            name="softcap_attention",
        )(q, k, v, q_documents, k_documents)

    return run


def _kernel(q: Any, k: Any, v: Any, q_documents: Any, k_documents: Any, out: Any, *scratch: Any, cap: float) -> None:
    """Add one block of keys to one block of queries."""
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    highest, total, summed = scratch
    row, column = pl.program_id(2), pl.program_id(3)

    @pl.when(column == 0)  # type: ignore[untyped-decorator]
    def _begin() -> None:
        highest[...] = jnp.full_like(highest, MASKED)
        total[...] = jnp.zeros_like(total)
        summed[...] = jnp.zeros_like(summed)

    @pl.when(column <= row)  # type: ignore[untyped-decorator]
    def _add() -> None:
        scores_QK, visible_QK = _scores(q[0, 0], k[0, 0], first_row=row * BLOCK, first_column=column * BLOCK, cap=cap)
        visible_QK &= q_documents[0][:, :1] == k_documents[0][:1, :]
        scores_QK = jnp.where(visible_QK, scores_QK, MASKED)
        before_QL = highest[...]
        now_QL = jnp.maximum(before_QL, scores_QK.max(1, keepdims=True))
        weights_QK = jnp.where(visible_QK, jnp.exp(scores_QK - now_QL[:, :1]), 0.0)
        shrink_QL = jnp.exp(before_QL - now_QL)
        highest[...] = now_QL
        total[...] = shrink_QL * total[...] + weights_QK.sum(1, keepdims=True)
        values_QE = jnp.dot(weights_QK.astype(v.dtype), v[0, 0], preferred_element_type=jnp.float32)
        summed[...] = shrink_QL[:, :1] * summed[...] + values_QE

    # Last block of a row of blocks. Every token sees itself, so no total is 0.
    @pl.when(column == row)  # type: ignore[untyped-decorator]
    def _end() -> None:
        out[0, 0] = (summed[...] / total[:, :1]).astype(out.dtype)


def _scores(q_QE: Any, k_KE: Any, *, first_row: Any, first_column: Any, cap: float) -> tuple[Any, Any]:
    """Return the capped scores [Q,K] of a pair of blocks, and whether each key comes no later than the query."""
    import jax
    import jax.numpy as jnp

    over_width = (((1,), (1,)), ((), ()))
    scores_QK = jax.lax.dot_general(q_QE, k_KE, over_width, preferred_element_type=jnp.float32)
    if cap:
        scores_QK = cap * jnp.tanh(scores_QK / cap)
    row_QK = first_row + jax.lax.broadcasted_iota(jnp.int32, scores_QK.shape, 0)
    column_QK = first_column + jax.lax.broadcasted_iota(jnp.int32, scores_QK.shape, 1)
    return scores_QK, row_QK >= column_QK
