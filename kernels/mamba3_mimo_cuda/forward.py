"""Forward kernels of the chunk-parallel scan: local super-chunk states, state passing, outputs.

Rows of one chunk's tiles are in (rank, time) order, i = r * C + c, so that the weight of a pair of rows depends on
i % C and j % C alone. Letters: see shape.py. Scalars per token come from prefix.py: `lc` in-chunk cumulated log2
decay, `sk` write scale gamma + sigma, `gm` gamma, `wk` weight of a write at the end of its super-chunk.
"""

from typing import Any

import tilelang.language as T

from kernels.mamba3_mimo_cuda.shape import ScanShape
from kernels.mamba3_mimo_cuda.tiles import BF16, F16, F32, bf16, f32, make_rotated, rank_sum


def local_states(s: ScanShape, *, threads: int = 128) -> Any:
    """F1: local[b,h,k] = sum over the super-chunk of wk * k~ (x) x, fp32 [B,H,K,N,P]."""
    B, S, H, G, N, P, R, A, C, M, L, K = s.B, s.S, s.H, s.G, s.N, s.P, s.R, s.A, s.C, s.M, s.L, s.K
    rotated = make_rotated(s)

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
            T.clear(acc)
            for ic in T.serial(T.min(L // C, S // C - sc * (L // C))):
                t0 = sc * L + ic * C
                rotated(k_s, k, k_bias, cs, b, h, t0)
                for i, p in T.Parallel(M, P):
                    x_s[i, p] = bf16(f32(v[b, t0 + i % C, h, p]) * wk[b, h, t0 + i % C] * psi[h, i // C, p])
                T.gemm(k_s, x_s, acc, transpose_A=True)
            T.copy(acc, local[b, h, sc, :, :])

    return f1_local_states


def pass_states(s: ScanShape, *, reverse: bool, threads: int = 128) -> Any:
    """F2: replace every local state by the state that enters its super-chunk; `final` is the one that leaves the last.

    In place on local [B,H,K,N,P] fp32; carry [B,H,K] fp32 is the decay of a whole super-chunk. With `reverse` the
    super-chunks are walked from the last to the first.
    """
    B, H, N, P, K = s.B, s.H, s.N, s.P, s.K
    per_block = threads * 4
    blocks = N * P // per_block

    @T.prim_func
    def f2_pass_states(
        local: T.Tensor((B * H, K, N * P), F32),
        carry: T.Tensor((B * H, K), F32),
        final: T.Tensor((B * H, N * P), F32),
    ):
        with T.Kernel(blocks, B * H, threads=threads) as (bx, bh):
            state = T.alloc_fragment((per_block,), F32)
            entry = T.alloc_fragment((per_block,), F32)
            T.clear(state)
            for step in T.serial(K):
                sc = K - 1 - step if reverse else step
                T.copy(local[bh, sc, bx * per_block : (bx + 1) * per_block], entry)
                T.copy(state, local[bh, sc, bx * per_block : (bx + 1) * per_block])
                for i in T.Parallel(per_block):
                    state[i] = state[i] * carry[bh, sc] + entry[i]
            T.copy(state, final[bh, bx * per_block : (bx + 1) * per_block])

    return f2_pass_states


def outputs(s: ScanShape, *, threads: int = 128) -> Any:
    """F3: o [B,S,H,P] bf16 from the states `start` [B,H,K,N,P] fp32 that enter the super-chunks."""
    B, S, H, G, N, P, R, A, C, M, L, K = s.B, s.S, s.H, s.G, s.N, s.P, s.R, s.A, s.C, s.M, s.L, s.K
    rotated = make_rotated(s)

    @T.prim_func
    def f3_outputs(
        q: T.Tensor((B, S, R, G, N), BF16),
        k: T.Tensor((B, S, R, G, N), BF16),
        v: T.Tensor((B, S, H, P), BF16),
        z: T.Tensor((B, S, H, P), BF16),
        q_bias: T.Tensor((H, R, N), BF16),
        k_bias: T.Tensor((H, R, N), BF16),
        psi: T.Tensor((H, R, P), F32),
        zeta: T.Tensor((H, R, P), F32),
        phi: T.Tensor((H, R, P), F32),
        D: T.Tensor((H,), F32),
        cs: T.Tensor((B, H, S, 2 * A), F16),
        lc: T.Tensor((B, H, S), F32),
        sk: T.Tensor((B, H, S), F32),
        gm: T.Tensor((B, H, S), F32),
        start: T.Tensor((B, H, K, N, P), F32),
        o: T.Tensor((B, S, H, P), BF16),
    ):
        with T.Kernel(H, K, B, threads=threads) as (h, sc, b):
            q_s = T.alloc_shared((M, N), BF16)
            k_s = T.alloc_shared((M, N), BF16)
            x_s = T.alloc_shared((M, P), BF16)
            xw_s = T.alloc_shared((M, P), BF16)
            h_s = T.alloc_shared((N, P), BF16)
            w_s = T.alloc_shared((C, C), F32)
            y_s = T.alloc_shared((M, P + 8), F32)
            state = T.alloc_fragment((N, P), F32)
            y = T.alloc_fragment((M, P), F32)
            score = T.alloc_fragment((M, M), F32)
            mixed = T.alloc_fragment((M, M), BF16)
            T.copy(start[b, h, sc, :, :], state)
            for ic in T.serial(T.min(L // C, S // C - sc * (L // C))):
                t0 = sc * L + ic * C
                last = t0 + C - 1
                rotated(q_s, q, q_bias, cs, b, h, t0)
                rotated(k_s, k, k_bias, cs, b, h, t0)
                for i, p in T.Parallel(M, P):
                    x = f32(v[b, t0 + i % C, h, p]) * psi[h, i // C, p]
                    x_s[i, p] = bf16(x)
                    xw_s[i, p] = bf16(x * T.exp2(lc[b, h, last] - lc[b, h, t0 + i % C]) * sk[b, h, t0 + i % C])
                for t, u in T.Parallel(C, C):
                    decay = T.exp2(T.min(lc[b, h, t0 + t] - lc[b, h, t0 + u], 0.0)) * sk[b, h, t0 + u]
                    w_s[t, u] = T.if_then_else(t > u, decay, T.if_then_else(t == u, gm[b, h, t0 + t], 0.0))
                T.copy(state, h_s)
                T.gemm(q_s, h_s, y, clear_accum=True)
                T.gemm(q_s, k_s, score, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(M, M):
                    mixed[i, j] = bf16(score[i, j] * w_s[i % C, j % C] + T.if_then_else(i == j, D[h], 0.0))
                for i, p in T.Parallel(M, P):
                    y[i, p] = y[i, p] * T.exp2(lc[b, h, t0 + i % C])
                T.gemm(mixed, x_s, y)
                for n, p in T.Parallel(N, P):
                    state[n, p] = state[n, p] * T.exp2(lc[b, h, last])
                T.gemm(k_s, xw_s, state, transpose_A=True)
                for i, p in T.Parallel(M, P):
                    half_u = 0.5 * f32(z[b, t0 + i % C, h, p]) * zeta[h, i // C, p]
                    y_s[i, p] = y[i, p] * (half_u * T.tanh(half_u) + half_u) * phi[h, i // C, p]
                for c, p in T.Parallel(C, P):
                    o[b, t0 + c, h, p] = bf16(rank_sum(y_s, c, p, R, C))

    return f3_outputs
