"""Forward kernels of the chunk-parallel scan: local super-chunk states, state passing, outputs.

Rows of one chunk's tiles are in (rank, time) order, i = r * C + c, so that the weight of a pair of rows depends on
i % C and j % C alone. Letters: see shape.py. Scalars per token come from prefix.py: `lc` in-chunk cumulated log2
decay, `sk` write scale gamma + sigma, `gm` gamma, `wk` weight of a write at the end of its super-chunk.
"""

# TileLang programs: tensors are positional and annotated with calls, `T` is the language's own name, bodies are long.
# ruff: noqa: C901, N812, PLR0913, PLR0915, PLR0917
# mypy: ignore-errors

from typing import Any

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from kernels.mamba3_mimo.cuda.shape import ScanShape
from kernels.mamba3_mimo.cuda.tiles import (
    BF16,
    F16,
    F32,
    bf16,
    f32,
    make_angles,
    make_bias,
    make_expanded,
    make_factor,
    make_load,
    make_piece,
    make_rotated,
    make_rotated_shared,
    make_weight_scales,
    make_weights,
    rank_sum,
)


def local_states(s: ScanShape, *, threads: int = 128) -> Any:
    """F1: local[b,h,k] = sum over the super-chunk of wk * k~ (x) x, fp32 [B,H,K,N,P]."""
    B, S, H, G, N, P, R, A, C, M, L, K = s.B, s.S, s.H, s.G, s.N, s.P, s.R, s.A, s.C, s.M, s.L, s.K
    load, angles, rotated = make_load(s), make_angles(s, threads), make_rotated(s, threads)
    piece, expanded = make_piece(s, threads), make_expanded(s, threads)
    hold, factor, step = make_bias(s, threads), make_factor(s), 4 * threads // P

    @T.prim_func
    def f1_local_states(
        k: T.Tensor((B, S, R, G, N), BF16),
        v: T.Tensor((B, S, H, P), BF16),
        k_bias: T.Tensor((H, R, N), BF16),
        psi: T.Tensor((H, R, P), F32),
        cs: T.Tensor((B, H, S // C, A // 4, C, 8), F16),
        wk: T.Tensor((B, H, S), F32),
        local: T.Tensor((B, H, K, N, P), F32),
    ):
        with T.Kernel(H, K, B, threads=threads) as (h, sc, b):
            raw_s, k_s, x_s = T.alloc_shared((M, N), BF16), T.alloc_shared((M, N), BF16), T.alloc_shared((M, P), BF16)
            held, psi_l = T.alloc_local((N * M // threads,), BF16), T.alloc_local((4 * R,), F32)
            wk_s = T.alloc_shared((L,), F32)
            bar = T.alloc_barrier([threads])
            cos, sin = (T.alloc_local((A * M // threads,), F16) for _ in range(2))
            v_l, scale = T.alloc_local((C // step * 4,), BF16), T.alloc_local((C // step,), F32)
            acc = T.alloc_fragment((N, P), F32)
            T.annotate_layout({raw_s: make_swizzled_layout(raw_s)})
            tx = T.get_thread_binding()
            nc = T.min(L // C, S // C - sc * (L // C))
            load(raw_s, k, bar, b, h, sc * L)
            T.mbarrier_arrive(bar[0])
            hold(held, k_bias, h, tx)
            factor(psi_l, psi, h, tx)
            T.copy(wk[b, h, sc * L : (sc + 1) * L], wk_s)
            T.clear(acc)
            angles(cos, sin, cs, b, h, sc * L, tx)
            piece(v_l, v, b, h, sc * L, tx)
            for ic in T.serial(nc):
                t1 = sc * L + T.min(ic + 1, nc - 1) * C
                for u in T.unroll(C // step):
                    scale[u] = wk_s[ic * C + u * step + tx // (P // 4)]
                expanded(x_s, v_l, scale, psi_l, tx)
                T.mbarrier_wait_parity(bar[0], ic % 2)
                rotated(k_s, raw_s, held, cos, sin, tx)
                angles(cos, sin, cs, b, h, t1, tx)
                piece(v_l, v, b, h, t1, tx)
                T.sync_threads()
                load(raw_s, k, bar, b, h, t1)
                T.mbarrier_arrive(bar[0])
                T.gemm(k_s, x_s, acc, transpose_A=True)
            T.mbarrier_wait_parity(bar[0], nc % 2)
            T.copy(acc, local[b, h, sc, :, :])

    return f1_local_states


def pass_states(s: ScanShape, *, reverse: bool, threads: int = 128) -> Any:
    """F2: replace every local state by the state that enters its super-chunk; `final` is the one that leaves the last.

    In place on local [B,H,K,N,P] fp32; carry [B,H,K] fp32 is the decay of a whole super-chunk. With `reverse` the
    super-chunks are walked from the last to the first.
    """
    B, H, N, P, K = s.B, s.H, s.N, s.P, s.K
    per_block, ahead = threads * 2, 8
    blocks = N * P // per_block

    @T.prim_func
    def f2_pass_states(
        local: T.Tensor((B * H, K, N * P), F32),
        carry: T.Tensor((B * H, K), F32),
        final: T.Tensor((B * H, N * P), F32),
    ):
        with T.Kernel(blocks, B * H, threads=threads) as (bx, bh):
            state = T.alloc_local((2,), F32)
            entry = T.alloc_local((ahead * 2,), F32)
            decay = T.alloc_local((ahead,), F32)
            at = bx * per_block + T.get_thread_binding() * 2
            for e in T.vectorized(2):
                state[e] = 0.0
            for group in T.serial(T.ceildiv(K, ahead)):
                for u in T.unroll(ahead):
                    near = T.min(group * ahead + u, K - 1)
                    for e in T.vectorized(2):
                        entry[u * 2 + e] = local[bh, K - 1 - near if reverse else near, at + e]
                    decay[u] = carry[bh, K - 1 - near if reverse else near]
                for u in T.unroll(ahead):
                    if group * ahead + u < K:
                        sc = K - 1 - (group * ahead + u) if reverse else group * ahead + u
                        for e in T.vectorized(2):
                            local[bh, sc, at + e] = state[e]
                        for e in T.vectorized(2):
                            state[e] = state[e] * decay[u] + entry[u * 2 + e]
            for e in T.vectorized(2):
                final[bh, at + e] = state[e]

    return f2_pass_states


def outputs(s: ScanShape, *, save_states: bool = False, threads: int = 128) -> Any:
    """F3: o [B,S,H,P] bf16 from the states `start` [B,H,K,N,P] fp32 that enter the super-chunks.

    With `save_states` also the state that enters every chunk, bf16 [B,H,S/C,N,P]; else `states` has length 1 there.
    """
    num_states = s.chunks if save_states else 1
    B, S, H, G, N, P, R, A, C, M, L, K = s.B, s.S, s.H, s.G, s.N, s.P, s.R, s.A, s.C, s.M, s.L, s.K
    load, angles, rotated = make_load(s), make_angles(s, threads), make_rotated_shared(s, threads)
    piece, expanded = make_piece(s, threads), make_expanded(s, threads)
    factor, step = make_factor(s), 4 * threads // P
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
        cs: T.Tensor((B, H, S // C, A // 4, C, 8), F16),
        lc: T.Tensor((B, H, S), F32),
        sk: T.Tensor((B, H, S), F32),
        gm: T.Tensor((B, H, S), F32),
        start: T.Tensor((B, H, K, N, P), F32),
        o: T.Tensor((B, S, H, P), BF16),
        states: T.Tensor((B, H, num_states, N, P), BF16),
    ):
        with T.Kernel(H, K, B, threads=threads) as (h, sc, b):
            T.annotate_min_blocks_per_sm(3)
            q_raw, k_raw = T.alloc_shared((M, N), BF16), T.alloc_shared((M, N), BF16)
            q_s, k_s = T.alloc_shared((M, N), BF16), T.alloc_shared((M, N), BF16)
            x_s, xw_s = T.alloc_shared((M, P), BF16), T.alloc_shared((M, P), BF16)
            h_s = T.alloc_shared((N, P), BF16)
            w_s = T.alloc_shared((C, C + 8), F32)
            z_s = T.alloc_shared((C, P + 8), BF16)
            qb_s, kb_s = T.alloc_shared((1, R, N), BF16), T.alloc_shared((1, R, N), BF16)
            zeta_s, phi_s = T.alloc_shared((R, P), F32), T.alloc_shared((R, P), F32)
            psi_l = T.alloc_local((4 * R,), F32)
            lc_s, sk_s, gm_s, read_s, write_s = (T.alloc_shared((L,), F32) for _ in range(5))
            bar = T.alloc_barrier([threads])
            cos, sin = (T.alloc_local((A * M // threads,), F16) for _ in range(2))
            v_l, z_l = (T.alloc_local((C // step * 4,), BF16) for _ in range(2))
            one, scale = (T.alloc_local((C // step,), F32) for _ in range(2))
            state, y = T.alloc_fragment((N, P), F32), T.alloc_fragment((M, P), F32)
            score, mixed = T.alloc_fragment((M, M), F32), T.alloc_fragment((M, M), BF16)
            skip = T.alloc_local((1,), F32)
            T.annotate_layout({t: make_swizzled_layout(t) for t in (q_raw, k_raw)})
            tx = T.get_thread_binding()
            nc = T.min(L // C, S // C - sc * (L // C))
            load(q_raw, q, bar, b, h, sc * L)
            load(k_raw, k, bar, b, h, sc * L)
            T.mbarrier_arrive(bar[0])
            T.copy(q_bias[h : h + 1, :, :], qb_s)
            T.copy(k_bias[h : h + 1, :, :], kb_s)
            for r, p in T.Parallel(R, P):
                zeta_s[r, p] = 0.5 * zeta[h, r, p]
                phi_s[r, p] = phi[h, r, p]
            weight_scales(lc_s, sk_s, gm_s, read_s, write_s, lc, sk, gm, b, h, sc)
            T.copy(start[b, h, sc, :, :], state)
            skip[0] = D[h]
            factor(psi_l, psi, h, tx)
            for u in T.unroll(C // step):
                one[u] = 1.0
            angles(cos, sin, cs, b, h, sc * L, tx)
            piece(v_l, v, b, h, sc * L, tx)
            piece(z_l, z, b, h, sc * L, tx)
            for ic in T.serial(nc):
                at = ic * C
                t1 = sc * L + T.min(ic + 1, nc - 1) * C
                for u in T.unroll(C // step):
                    scale[u] = write_s[at + u * step + tx // (P // 4)]
                expanded(x_s, v_l, one, psi_l, tx)
                expanded(xw_s, v_l, scale, psi_l, tx)
                for u in T.unroll(C // step):
                    for e in T.vectorized(4):
                        z_s[u * step + tx // (P // 4), tx % (P // 4) * 4 + e] = z_l[u * 4 + e]
                weights(w_s, lc_s, sk_s, gm_s, at)
                T.copy(state, h_s)
                for n, p in T.Parallel(N, P):
                    state[n, p] = state[n, p] * read_s[at + C - 1]
                T.mbarrier_wait_parity(bar[0], ic % 2)
                rotated(q_s, q_raw, qb_s, cos, sin, tx)
                rotated(k_s, k_raw, kb_s, cos, sin, tx)
                angles(cos, sin, cs, b, h, t1, tx)
                piece(v_l, v, b, h, t1, tx)
                piece(z_l, z, b, h, t1, tx)
                T.sync_threads()
                load(q_raw, q, bar, b, h, t1)
                load(k_raw, k, bar, b, h, t1)
                T.mbarrier_arrive(bar[0])
                T.wgmma_gemm(q_s, h_s, y, clear_accum=True)
                T.wgmma_gemm(q_s, k_s, score, transpose_B=True, clear_accum=True)
                T.gemm(k_s, xw_s, state, transpose_A=True)
                T.warpgroup_fence_operand(y, num_regs=M * P // threads)
                T.warpgroup_fence_operand(score, num_regs=M * M // threads)
                if save_states:
                    T.copy(h_s, states[b, h, sc * (L // C) + ic, :, :])
                for i, j in T.Parallel(M, M):
                    mixed[i, j] = bf16(score[i, j] * w_s[i % C, j % C] + T.if_then_else(i == j, skip[0], 0.0))
                for i, p in T.Parallel(M, P):
                    y[i, p] = y[i, p] * read_s[at + i % C]
                T.gemm(mixed, x_s, y)
                for i, p in T.Parallel(M, P):
                    half_u = f32(z_s[i % C, p]) * zeta_s[i // C, p]
                    y[i, p] = y[i, p] * ((half_u * T.tanh(half_u) + half_u) * phi_s[i // C, p])
                T.copy(y, x_s)
                for c, p in T.Parallel(C, P):
                    o[b, sc * L + at + c, h, p] = bf16(rank_sum(x_s, c, p, R, C))
            T.mbarrier_wait_parity(bar[0], nc % 2)

    return f3_outputs
