"""Attention kernels for TPUs in a torch_xla graph: causal, inside documents, without an S x S array.

    flash           torch_xla's kernel; cannot cap scores
    splash          JAX's splash attention with its fused backward pass, called as JAX functions
    pallas_softcap  our own forward kernel (softcap_attention) as a native custom call, with splash's backward pass

Each takes q, k, v [B,H,S,E] and document numbers [B,S] that never fall along a row, all as run-time tensors. A machine
without a TPU can trace and compile them. `interpret` runs splash and pallas_softcap on a CPU, for tests.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ablate.kernels.errors import KernelUnsupported
from ablate.kernels.xla import jax_calls as xla_jax

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


LARGEST_BLOCK = 512
LENGTHS: dict[str, tuple[int, tuple[int, ...]]] = {
    "flash": (1024, (128, 256, 512)),
    "splash": (BLOCK, ()),
    "pallas_softcap": (BLOCK, ()),
}
"""Kernel -> (multiple, other lengths) of the allowed tokens per row. flash cannot take a part of a block."""
DTYPES = (torch.float32, torch.bfloat16)


def flash(q_BHSE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, run_BS: Tensor, *, softcap: float) -> Tensor:
    """Return the attended values [B,H,S,E] from torch_xla's kernel."""
    from torch_xla.experimental import custom_kernel

    _check("flash", q_BHSE)
    if softcap:
        raise KernelUnsupported(f"attention 'flash' on lane xla cannot cap scores; softcap is {softcap}, allowed: 0")
    xla_jax.lower_kernels_for_tpu()
    documents_BS = run_BS.float()  # the kernel's backward pass needs floating point
    scale = q_BHSE.shape[-1] ** -0.5
    out: Tensor = custom_kernel.flash_attention(q_BHSE, k_BHSE, v_BHSE, True, documents_BS, documents_BS, scale)
    return out


def splash(
    q_BHSE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, run_BS: Tensor, *, softcap: float, interpret: bool = False
) -> Tensor:
    """Return the attended values [B,H,S,E] from JAX's splash attention."""
    _check("splash", q_BHSE)
    kernel = _Splash.of(q_BHSE, softcap, interpret)
    out: Tensor = _SplashFunction.apply(kernel, _scaled(q_BHSE), k_BHSE, v_BHSE, run_BS.int())  # type: ignore[no-untyped-call]
    return out


def pallas_softcap(
    q_BHSE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, run_BS: Tensor, *, softcap: float, interpret: bool = False
) -> Tensor:
    """Return the attended values [B,H,S,E] from our own kernel."""
    _check("pallas_softcap", q_BHSE)
    kernel = _Splash.of(q_BHSE, softcap, interpret)
    out: Tensor = _SoftcapFunction.apply(kernel, _scaled(q_BHSE), k_BHSE, v_BHSE, run_BS.int())  # type: ignore[no-untyped-call]
    return out


def _scaled(q_BHSE: Tensor) -> Tensor:
    scale: float = q_BHSE.shape[-1] ** -0.5
    return q_BHSE * scale


def _check(name: str, q_BHSE: Tensor) -> None:
    if q_BHSE.device.type != "xla":
        raise KernelUnsupported(f"attention '{name}' of lane xla runs on an XLA device; q is on {q_BHSE.device.type}")
    if q_BHSE.dtype not in DTYPES:
        raise KernelUnsupported(f"attention '{name}' takes float32, bfloat16; q is {q_BHSE.dtype}")
    length, (multiple, others) = q_BHSE.shape[2], LENGTHS[name]
    if length % multiple and length not in others:
        or_one = f"{', '.join(map(str, others))} or " if others else ""
        raise KernelUnsupported(
            f"attention '{name}' takes rows of {or_one}a multiple of {multiple} tokens; they have {length}"
        )


class _Splash:
    """JAX's splash attention for one number of heads, length and cap, as functions of flat arrays."""

    def __init__(self, heads: int, length: int, softcap: float, interpret: bool) -> None:
        self._heads, self._length, self._softcap, self._interpret = heads, length, softcap, interpret
        self.softcap = softcap_attention(softcap, interpret)
        self.platform = "cpu" if interpret else "tpu"
        self.native = not interpret
        self._residuals: Any = None

    @classmethod
    def of(cls, q_BHSE: Tensor, softcap: float, interpret: bool) -> "_Splash":
        return _splash(q_BHSE.shape[1], q_BHSE.shape[2], softcap, interpret)

    def forward(self, q: Any, k: Any, v: Any, documents: Any) -> Any:
        """Return the attended values and the residuals for the backward pass."""
        import jax

        out, pullback = jax.vjp(partial(self._attend, documents), q, k, v)
        leaves, self._residuals = jax.tree.flatten(pullback)
        return out, *leaves

    def backward(self, grad: Any, *leaves: Any) -> Any:
        """Return the gradients of q, k and v from the output's gradient and the residuals of `forward`."""
        import jax

        return jax.tree.unflatten(self._residuals, leaves)(grad)

    def gradients(self, q: Any, k: Any, v: Any, documents: Any, grad: Any) -> Any:
        """Return the gradients of q, k and v; recomputes the forward pass."""
        import jax

        return jax.vjp(partial(self._attend, documents), q, k, v)[1](grad)

    def _attend(self, documents: Any, q: Any, k: Any, v: Any) -> Any:
        """Return the attended values [B,H,S,E]."""
        import jax
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

        size = next(size for size in (LARGEST_BLOCK, 256, BLOCK) if self._length % size == 0)
        names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute")
        kernel = kernels.make_splash_mha(
            masks.MultiHeadMask([masks.CausalMask((self._length, self._length))] * self._heads),
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=self._softcap or None,
            interpret=self._interpret,
            block_sizes=kernels.BlockSizes(**{f"block_{name}": size for name in names}, use_fused_bwd_kernel=True),
        )

        def of_row(q: Any, k: Any, v: Any, documents: Any) -> Any:
            return kernel(q, k, v, segment_ids=kernels.SegmentIds(documents, documents))

        return jax.vmap(of_row)(q, k, v, documents)


@lru_cache(maxsize=16)
def _splash(heads: int, length: int, softcap: float, interpret: bool) -> _Splash:
    return _Splash(heads, length, softcap, interpret)


class _SplashFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: _Splash, *tensors: Tensor) -> Tensor:
        out, *residuals = xla_jax.call_jax(_method(kernel, "forward"), tensors, platform=kernel.platform)
        ctx.kernel = kernel
        ctx.save_for_backward(*residuals)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = (grad, *ctx.saved_tensors)
        return None, *xla_jax.call_jax(_method(ctx.kernel, "backward"), tensors, platform=ctx.kernel.platform), None


class _SoftcapFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: _Splash, q: Tensor, k: Tensor, v: Tensor, run_BS: Tensor) -> Tensor:
        ctx.kernel = kernel
        ctx.save_for_backward(q, k, v, run_BS)
        lanes = run_BS.unsqueeze(-1).expand(*run_BS.shape, LANES).contiguous()
        sublanes = run_BS.unsqueeze(1).expand(-1, SUBLANES, -1).contiguous()
        tensors = (q, k, v, lanes, sublanes)
        if kernel.native:
            return xla_jax.pallas_call(kernel.softcap, tensors, [(q.shape, q.dtype)])[0]
        return xla_jax.call_jax(kernel.softcap, tensors, platform=kernel.platform)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = (*ctx.saved_tensors, grad)
        return None, *xla_jax.call_jax(_method(ctx.kernel, "gradients"), tensors, platform=ctx.kernel.platform), None


@lru_cache(maxsize=64)
def _method(kernel: _Splash, name: str) -> Callable[..., Any]:
    """Return the bound method, always the same object: lowered functions are cached by identity."""
    bound: Callable[..., Any] = getattr(kernel, name)
    return bound


KERNELS: dict[str, Callable[..., Tensor]] = {"flash": flash, "splash": splash, "pallas_softcap": pallas_softcap}
"""Kernels by name."""

CALLED: dict[str, tuple[str, ...]] = {
    "flash": ("_flash_attention_kernel", "_flash_attention_dkv_kernel", "_flash_attention_dq_kernel"),
    "splash": ("splash_mha_fwd", "splash_mha_dkv"),
    "pallas_softcap": ("softcap_attention", "splash_mha_fwd", "splash_mha_dkv"),
}
"""Kernel -> prefixes of the names that one layer calls once each in both passes. JAX appends block sizes."""


def calls_problem(attention: str, calls: Mapping[str, int], *, layers: int) -> str | None:
    """Return how a training step's kernel `calls` differ from those of `layers` layers of `attention`.

    None if they are equal. An attention that is not a kernel of this module calls none.
    """
    expected = dict.fromkeys(CALLED.get(attention, ()), layers)
    in_graph: Counter[str] = Counter()
    for name, count in calls.items():
        in_graph[next((prefix for prefix in expected if name.startswith(prefix)), name)] += count
    if in_graph == expected:
        return None
    return f"not in the graph: {layers} layers of it call {_counted(expected)}, the graph {_counted(in_graph)}"


def _counted(calls: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(calls.items())) or "no kernel"
