"""Forward kernels of the chunk-parallel scan: local super-chunk states, state passing, outputs.

Rows of one chunk's tiles are in (rank, time) order, i = r * C + c, so that the weight of a pair of rows depends on
i % C and j % C alone. Letters: see shape.py. Scalars per token come from prefix.py: `lc` in-chunk cumulated log2
decay, `sk` write scale gamma + sigma, `gm` gamma, `wk` weight of a write at the end of its super-chunk.
"""

from typing import Any

import tilelang.language as T

from kernels.mamba3_mimo_cuda.shape import ScanShape

BF16, F16, F32 = "bfloat16", "float16", "float32"


def local_states(s: ScanShape, *, threads: int = 128) -> Any:
    """F1: local[b,h,n] = sum over the super-chunk of wk * k~ (x) x, fp32 [B,H,K,N,P]."""
    B, S, H, G, N, P, R, A, C, M, L, K = s.B, s.S, s.H, s.G, s.N, s.P, s.R, s.A, s.C, s.M, s.L, s.K
    half = N // 2

    @T.prim_func
    def f1_local_states(
        k: T.Tensor((B, S, R, G, N), BF16),
        v: T.Tensor((B, S, H, P), BF16),
        k_bias: T.Tensor((H, R, N), BF16),
        psi: T.Tensor((H, R, P), F32),
        cs: T.Tensor((B, H, S, 2 * A), F16),
        wk: T.Tensor((B, H, S), F32),
        local: T.Tensor((B, H, K, N, P), F32),
    ):
        with T.Kernel(H, K, B, threads=threads) as (h, sc, b):
            k_s = T.alloc_shared((M, N), BF16)
            x_s = T.alloc_shared((M, P), BF16)
            acc = T.alloc_fragment((N, P), F32)
            g = h // (H // G)
            T.clear(acc)
            for ic in T.serial(T.min(L // C, S // C - sc * (L // C))):
                t0 = sc * L + ic * C
                for i, j in T.Parallel(M, A):
                    c = T.Cast(F32, cs[b, h, t0 + i % C, j])
                    w = T.Cast(F32, cs[b, h, t0 + i % C, A + j])
                    lo = T.Cast(F32, k[b, t0 + i % C, i // C, g, j] + k_bias[h, i // C, j])
                    hi = T.Cast(F32, k[b, t0 + i % C, i // C, g, half + j] + k_bias[h, i // C, half + j])
                    k_s[i, j] = T.Cast(BF16, lo * c - hi * w)
                    k_s[i, half + j] = T.Cast(BF16, lo * w + hi * c)
                if A < half:
                    for i, j in T.Parallel(M, half - A):
                        k_s[i, A + j] = k[b, t0 + i % C, i // C, g, A + j] + k_bias[h, i // C, A + j]
                        k_s[i, half + A + j] = (
                            k[b, t0 + i % C, i // C, g, half + A + j] + k_bias[h, i // C, half + A + j]
                        )
                for c, p in T.Parallel(C, P):
                    vw = T.Cast(F32, v[b, t0 + c, h, p]) * wk[b, h, t0 + c]
                    for r in T.serial(R):
                        x_s[r * C + c, p] = T.Cast(BF16, vw * psi[h, r, p])
                T.gemm(k_s, x_s, acc, transpose_A=True)
            T.copy(acc, local[b, h, sc, :, :])

    return f1_local_states
