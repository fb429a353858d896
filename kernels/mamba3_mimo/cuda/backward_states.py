"""Backward kernels that prepare the walk: local state gradients of the super-chunks, and the states of the chunks.

Letters: see shape.py; scalars per token: see prefix.py.
"""

# TileLang programs: tensors are positional and annotated with calls, `T` is the language's own name, bodies are long.
# ruff: noqa: N812, PLR0913, PLR0915, PLR0917
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
    make_scales,
)


def local_gradients(s: ScanShape, *, threads: int = 128) -> Any:
    """B1: local[b,h,k] = sum over the super-chunk of wq * q~ (x) g, fp32 [B,H,K,N,P]."""
    B, S, H, G, N, P, R, A, C, M, L, K = s.B, s.S, s.H, s.G, s.N, s.P, s.R, s.A, s.C, s.M, s.L, s.K
    load, angles, rotated = make_load(s), make_angles(s, threads), make_rotated(s, threads)
    piece, hold, step = make_piece(s, threads), make_bias(s, threads), 4 * threads // P
    rows = C // step

    @T.prim_func
    def b1_local_gradients(
        q: T.Tensor((B, S, R, G, N), BF16),
        z: T.Tensor((B, S, H, P), BF16),
        do: T.Tensor((B, S, H, P), BF16),
        q_bias: T.Tensor((H, R, N), BF16),
        zeta: T.Tensor((H, R, P), F32),
        phi: T.Tensor((H, R, P), F32),
        cs: T.Tensor((B, H, S // C, A // 4, C, 8), F16),
        wq: T.Tensor((B, H, S), F32),
        local: T.Tensor((B, H, K, N, P), F32),
    ):
        with T.Kernel(H, K, B, threads=threads) as (h, sc, b):
            raw_s, q_s, g_s = T.alloc_shared((M, N), BF16), T.alloc_shared((M, N), BF16), T.alloc_shared((M, P), BF16)
            held = T.alloc_local((N * M // threads,), BF16)
            zeta_s, phi_s = T.alloc_shared((R, P), F32), T.alloc_shared((R, P), F32)
            wq_s = T.alloc_shared((L,), F32)
            bar = T.alloc_barrier([threads])
            cos, sin = (T.alloc_local((A * M // threads,), F16) for _ in range(2))
            z_l, d_l = (T.alloc_local((rows * 4,), BF16) for _ in range(2))
            d32 = T.alloc_local((rows * 4,), F32)
            half_u = T.alloc_local((4,), F32)
            acc = T.alloc_fragment((N, P), F32)
            T.annotate_layout({raw_s: make_swizzled_layout(raw_s)})
            tx = T.get_thread_binding()
            nc = T.min(L // C, S // C - sc * (L // C))
            load(raw_s, q, bar, b, h, sc * L)
            T.mbarrier_arrive(bar[0])
            hold(held, q_bias, h, tx)
            for r, p in T.Parallel(R, P):
                zeta_s[r, p] = 0.5 * zeta[h, r, p]
                phi_s[r, p] = phi[h, r, p]
            T.copy(wq[b, h, sc * L : (sc + 1) * L], wq_s)
            T.clear(acc)
            angles(cos, sin, cs, b, h, sc * L, tx)
            piece(z_l, z, b, h, sc * L, tx)
            piece(d_l, do, b, h, sc * L, tx)
            for ic in T.serial(nc):
                t1 = sc * L + T.min(ic + 1, nc - 1) * C
                for u in T.unroll(rows):
                    for e in T.vectorized(4):
                        d32[u * 4 + e] = f32(d_l[u * 4 + e]) * wq_s[ic * C + u * step + tx // (P // 4)]
                for r in T.unroll(R):
                    for u in T.unroll(rows):
                        for e in T.vectorized(4):
                            half_u[e] = f32(z_l[u * 4 + e]) * zeta_s[r, tx % (P // 4) * 4 + e]
                        for e in T.vectorized(4):
                            g_s[r * C + u * step + tx // (P // 4), tx % (P // 4) * 4 + e] = bf16(
                                d32[u * 4 + e]
                                * (half_u[e] * T.tanh(half_u[e]) + half_u[e])
                                * phi_s[r, tx % (P // 4) * 4 + e]
                            )
                T.mbarrier_wait_parity(bar[0], ic % 2)
                rotated(q_s, raw_s, held, cos, sin, tx)
                angles(cos, sin, cs, b, h, t1, tx)
                piece(z_l, z, b, h, t1, tx)
                piece(d_l, do, b, h, t1, tx)
                T.sync_threads()
                load(raw_s, q, bar, b, h, t1)
                T.mbarrier_arrive(bar[0])
                T.gemm(q_s, g_s, acc, transpose_A=True)
            T.mbarrier_wait_parity(bar[0], nc % 2)
            T.copy(acc, local[b, h, sc, :, :])

    return b1_local_gradients


def chunk_states(s: ScanShape, *, threads: int = 128) -> Any:
    """B2: the state that enters every chunk, bf16 [B,H,S/C,N,P], from those that enter the super-chunks."""
    B, S, H, G, N, P, R, A, C, M, L, K = s.B, s.S, s.H, s.G, s.N, s.P, s.R, s.A, s.C, s.M, s.L, s.K
    load, angles, rotated = make_load(s), make_angles(s, threads), make_rotated(s, threads)
    piece, expanded, scales = make_piece(s, threads), make_expanded(s, threads), make_scales(s)
    hold, factor, step = make_bias(s, threads), make_factor(s), 4 * threads // P

    @T.prim_func
    def b2_chunk_states(
        k: T.Tensor((B, S, R, G, N), BF16),
        v: T.Tensor((B, S, H, P), BF16),
        k_bias: T.Tensor((H, R, N), BF16),
        psi: T.Tensor((H, R, P), F32),
        cs: T.Tensor((B, H, S // C, A // 4, C, 8), F16),
        lc: T.Tensor((B, H, S), F32),
        sk: T.Tensor((B, H, S), F32),
        start: T.Tensor((B, H, K, N, P), F32),
        states: T.Tensor((B, H, S // C, N, P), BF16),
    ):
        with T.Kernel(H, K, B, threads=threads) as (h, sc, b):
            raw_s, k_s, x_s = T.alloc_shared((M, N), BF16), T.alloc_shared((M, N), BF16), T.alloc_shared((M, P), BF16)
            h_s = T.alloc_shared((N, P), BF16)
            held, psi_l = T.alloc_local((N * M // threads,), BF16), T.alloc_local((4 * R,), F32)
            read_s, write_s = T.alloc_shared((L,), F32), T.alloc_shared((L,), F32)
            bar = T.alloc_barrier([threads])
            cos, sin = (T.alloc_local((A * M // threads,), F16) for _ in range(2))
            v_l, scale = T.alloc_local((C // step * 4,), BF16), T.alloc_local((C // step,), F32)
            state = T.alloc_fragment((N, P), F32)
            T.annotate_layout({raw_s: make_swizzled_layout(raw_s)})
            tx = T.get_thread_binding()
            nc = T.min(L // C, S // C - sc * (L // C))
            load(raw_s, k, bar, b, h, sc * L)
            T.mbarrier_arrive(bar[0])
            hold(held, k_bias, h, tx)
            factor(psi_l, psi, h, tx)
            scales(read_s, write_s, lc, sk, b, h, sc)
            T.copy(start[b, h, sc, :, :], state)
            angles(cos, sin, cs, b, h, sc * L, tx)
            piece(v_l, v, b, h, sc * L, tx)
            for ic in T.serial(nc):
                t1 = sc * L + T.min(ic + 1, nc - 1) * C
                T.copy(state, h_s)
                for n, p in T.Parallel(N, P):
                    state[n, p] = state[n, p] * read_s[ic * C + C - 1]
                for u in T.unroll(C // step):
                    scale[u] = write_s[ic * C + u * step + tx // (P // 4)]
                expanded(x_s, v_l, scale, psi_l, tx)
                T.mbarrier_wait_parity(bar[0], ic % 2)
                rotated(k_s, raw_s, held, cos, sin, tx)
                angles(cos, sin, cs, b, h, t1, tx)
                piece(v_l, v, b, h, t1, tx)
                T.sync_threads()
                load(raw_s, k, bar, b, h, t1)
                T.mbarrier_arrive(bar[0])
                T.gemm(k_s, x_s, state, transpose_A=True)
                T.copy(h_s, states[b, h, sc * (L // C) + ic, :, :])
            T.mbarrier_wait_parity(bar[0], nc % 2)

    return b2_chunk_states
