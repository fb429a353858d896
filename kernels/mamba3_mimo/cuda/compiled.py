"""Compile and cache the kernels of one shape and variant for sm_90a."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import tilelang
from tilelang import PassConfigKey

from kernels.mamba3_mimo.cuda import backward, backward_states, forward, prefix, reductions
from kernels.mamba3_mimo.cuda.shape import ScanShape
from kernels.mamba3_mimo.cuda.variant import Variant

TARGET = {"kind": "cuda", "arch": "sm_90a"}
"""Named, not probed: the same cache key on a machine without a GPU."""

KERNELS: dict[str, Callable[[ScanShape, Variant, int], Any]] = {
    "angle_sums": lambda s, v, n: prefix.angle_sums(s),
    "tables": lambda s, v, n: prefix.tables(s),
    "decays": lambda s, v, n: prefix.decays(s, num_tokens=n),
    "local_states": lambda s, v, n: forward.local_states(s),
    "pass_states": lambda s, v, n: forward.pass_states(s, reverse=False),
    "outputs": lambda s, v, n: forward.outputs(s, save_states=v.save_states),
    "local_gradients": lambda s, v, n: backward_states.local_gradients(s),
    "pass_gradients": lambda s, v, n: forward.pass_states(s, reverse=True),
    "chunk_states": lambda s, v, n: backward_states.chunk_states(s),
    "gradients": lambda s, v, n: backward.gradients(s),
    "reduce_heads": lambda s, v, n: reductions.reduce_heads(s),
    "scalar_gradients": lambda s, v, n: reductions.scalar_gradients(s, num_tokens=n),
    "edges": lambda s, v, n: reductions.edges(s),
    "angle_gradients": lambda s, v, n: reductions.angle_gradients(s),
}
"""Name -> builder of the TileLang program for (shape, variant, true sequence length)."""


def pass_configs(variant: Variant) -> dict[Any, Any]:
    """Return the compiler options of `variant`."""
    return {
        PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: not variant.warp_specialize,
        PassConfigKey.TL_ENABLE_FAST_MATH: variant.fast_math,
        PassConfigKey.TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE: variant.aggressive_smem_merge,
    }


@lru_cache(maxsize=256)
def kernel(name: str, shape: ScanShape, variant: Variant, num_tokens: int) -> Any:
    """Return the compiled kernel `name`; it takes torch tensors in the order of its program, outputs included."""
    program = KERNELS[name](shape, variant, num_tokens)
    return tilelang.compile(program, target=TARGET, execution_backend="tvm_ffi", pass_configs=pass_configs(variant))
