"""Forward kernels of the chunk-parallel scan: local super-chunk states, state passing, outputs.

Rows of one chunk's tiles are in (rank, time) order, i = r * C + c, so that the weight of a pair of rows depends on
i % C and j % C alone. Letters: see shape.py. Scalars per token come from prefix.py: `lc` in-chunk cumulated log2
decay, `sk` write scale gamma + sigma, `gm` gamma, `wk` weight of a write at the end of its super-chunk.
"""

from typing import Any

import tilelang.language as T

from kernels.mamba3_mimo_cuda.shape import ScanShape
from kernels.mamba3_mimo_cuda.tiles import (
    BF16,
    F16,
    F32,
    bf16,
    f32,
    make_fetch,
    make_fetch_angles,
    make_rotated,
    make_weight_scales,
    make_weights,
    rank_sum,
)


def local_states(s: ScanShape, *, threads: int = 128) -> Any:
    """F1: local[b,h,k] = sum over the super-chunk of wk * k~ (x) x, fp32 [B,H,K,N,P]."""
    B, S, H, G, N, P, R, A, C, M, L, K = s.B, s.S, s.H, s.G, s.N, s.P, s.R, s.A, s.C, s.M, s.L, s.K
    fetch, fetch_angles, rotated, still = make_fetch(s), make_fetch_angles(s), make_rotated(s), max(1, N // 2 - A)

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
            bias_s = T.alloc_shared((R, N), BF16)
            psi_s = T.alloc_shared((R, P), F32)
            wk_s = T.alloc_shared((L,), F32)
            lo, hi = T.alloc_fragment((M, A), BF16), T.alloc_fragment((M, A), BF16)
            lo_still, hi_still = T.alloc_fragment((M, still), BF16), T.alloc_fragment((M, still), BF16)
            cos, sin = T.alloc_fragment((M, A), F16), T.alloc_fragment((M, A), F16)
            vf, vw = T.alloc_fragment((C, P), BF16), T.alloc_fragment((C, P), F32)
            acc = T.alloc_fragment((N, P), F32)
            T.copy(k_bias[h, :, :], bias_s)
            T.copy(psi[h, :, :], psi_s)
            T.copy(wk[b, h, sc * L : (sc + 1) * L], wk_s)
            T.clear(acc)
            nc = T.min(L // C, S // C - sc * (L // C))
            fetch(lo, hi, lo_still, hi_still, k, b, h, sc * L)
            fetch_angles(cos, sin, cs, b, h, sc * L)
            T.copy(v[b, sc * L : sc * L + C, h, :], vf)
            for ic in T.serial(nc):
                t1 = sc * L + T.min(ic + 1, nc - 1) * C
                rotated(k_s, lo, hi, lo_still, hi_still, cos, sin, bias_s)
                for c, p in T.Parallel(C, P):
                    vw[c, p] = f32(vf[c, p]) * wk_s[ic * C + c]
                for r in T.unroll(R):
                    for c, p in T.Parallel(C, P):
                        x_s[r * C + c, p] = bf16(vw[c, p] * psi_s[r, p])
                fetch(lo, hi, lo_still, hi_still, k, b, h, t1)
                fetch_angles(cos, sin, cs, b, h, t1)
                T.copy(v[b, t1 : t1 + C, h, :], vf)
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
    fetch, fetch_angles, rotated, still = make_fetch(s), make_fetch_angles(s), make_rotated(s), max(1, N // 2 - A)
    weight_scales, weights = make_weight_scales(s), make_weights(s)

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
            q_s, k_s = T.alloc_shared((M, N), BF16), T.alloc_shared((M, N), BF16)
            x_s, xw_s = T.alloc_shared((M, P), BF16), T.alloc_shared((M, P), BF16)
            h_s = T.alloc_shared((N, P), BF16)
            w_s = T.alloc_shared((C, C), F32)
            y_s = T.alloc_shared((M, P + 8), F32)
            z_s = T.alloc_shared((C, P + 8), BF16)
            qb_s, kb_s = T.alloc_shared((R, N), BF16), T.alloc_shared((R, N), BF16)
            psi_s, zeta_s, phi_s = (T.alloc_shared((R, P), F32) for _ in range(3))
            lc_s, sk_s, gm_s, read_s, write_s = (T.alloc_shared((L,), F32) for _ in range(5))
            q_lo, q_hi, k_lo, k_hi = (T.alloc_fragment((M, A), BF16) for _ in range(4))
            q_lo_still, q_hi_still, k_lo_still, k_hi_still = (T.alloc_fragment((M, still), BF16) for _ in range(4))
            cos, sin = T.alloc_fragment((M, A), F16), T.alloc_fragment((M, A), F16)
            vf, zf = T.alloc_fragment((C, P), BF16), T.alloc_fragment((C, P), BF16)
            v32 = T.alloc_fragment((C, P), F32)
            state = T.alloc_fragment((N, P), F32)
            y = T.alloc_fragment((M, P), F32)
            score = T.alloc_fragment((M, M), F32)
            mixed = T.alloc_fragment((M, M), BF16)
            skip = T.alloc_local((1,), F32)
            T.copy(q_bias[h, :, :], qb_s)
            T.copy(k_bias[h, :, :], kb_s)
            T.copy(psi[h, :, :], psi_s)
            T.copy(zeta[h, :, :], zeta_s)
            T.copy(phi[h, :, :], phi_s)
            weight_scales(lc_s, sk_s, gm_s, read_s, write_s, lc, sk, gm, b, h, sc)
            T.copy(start[b, h, sc, :, :], state)
            skip[0] = D[h]
            nc = T.min(L // C, S // C - sc * (L // C))
            fetch(q_lo, q_hi, q_lo_still, q_hi_still, q, b, h, sc * L)
            fetch(k_lo, k_hi, k_lo_still, k_hi_still, k, b, h, sc * L)
            fetch_angles(cos, sin, cs, b, h, sc * L)
            T.copy(v[b, sc * L : sc * L + C, h, :], vf)
            T.copy(z[b, sc * L : sc * L + C, h, :], zf)
            for ic in T.serial(nc):
                at = ic * C
                t1 = sc * L + T.min(ic + 1, nc - 1) * C
                rotated(q_s, q_lo, q_hi, q_lo_still, q_hi_still, cos, sin, qb_s)
                rotated(k_s, k_lo, k_hi, k_lo_still, k_hi_still, cos, sin, kb_s)
                T.copy(vf, v32)
                for r in T.unroll(R):
                    for c, p in T.Parallel(C, P):
                        x = v32[c, p] * psi_s[r, p]
                        x_s[r * C + c, p] = bf16(x)
                        xw_s[r * C + c, p] = bf16(x * write_s[at + c])
                T.copy(zf, z_s[:, 0:P])
                weights(w_s, lc_s, sk_s, gm_s, at)
                T.copy(state, h_s)
                for n, p in T.Parallel(N, P):
                    state[n, p] = state[n, p] * read_s[at + C - 1]
                fetch(q_lo, q_hi, q_lo_still, q_hi_still, q, b, h, t1)
                fetch(k_lo, k_hi, k_lo_still, k_hi_still, k, b, h, t1)
                fetch_angles(cos, sin, cs, b, h, t1)
                T.copy(v[b, t1 : t1 + C, h, :], vf)
                T.copy(z[b, t1 : t1 + C, h, :], zf)
                T.gemm(q_s, h_s, y, clear_accum=True)
                T.gemm(q_s, k_s, score, transpose_B=True, clear_accum=True)
                T.gemm(k_s, xw_s, state, transpose_A=True)
                for i, j in T.Parallel(M, M):
                    mixed[i, j] = bf16(score[i, j] * w_s[i % C, j % C] + T.if_then_else(i == j, skip[0], 0.0))
                for i, p in T.Parallel(M, P):
                    y[i, p] = y[i, p] * read_s[at + i % C]
                T.gemm(mixed, x_s, y)
                for i, p in T.Parallel(M, P):
                    half_u = f32(z_s[i % C, p]) * (0.5 * zeta_s[i // C, p])
                    y_s[i, p] = y[i, p] * ((half_u * T.tanh(half_u) + half_u) * phi_s[i // C, p])
                for c, p in T.Parallel(C, P):
                    o[b, sc * L + at + c, h, p] = bf16(rank_sum(y_s, c, p, R, C))

    return f3_outputs
