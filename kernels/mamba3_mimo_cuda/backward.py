"""Backward kernels: local super-chunk state gradients, and one reverse walk that yields every gradient.

E is the gradient of the loss with respect to the state that leaves a chunk, g = dO * phi * silu(u) that with respect
to y, u = z * zeta. Rows are (rank, time), i = r * C + c. Letters: see shape.py; scalars per token: see prefix.py.
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
    make_column_sums,
    make_rotated,
    make_unrotated,
    rank_sum,
    row_sum,
)


def local_gradients(s: ScanShape, *, threads: int = 128) -> Any:
    """B1: local[b,h,k] = sum over the super-chunk of wq * q~ (x) g, fp32 [B,H,K,N,P]."""
    B, S, H, G, N, P, R, A, C, M, L, K = s.B, s.S, s.H, s.G, s.N, s.P, s.R, s.A, s.C, s.M, s.L, s.K
    rotated = make_rotated(s)

    @T.prim_func
    def b1_local_gradients(
        q: T.Tensor((B, S, R, G, N), BF16),
        z: T.Tensor((B, S, H, P), BF16),
        do: T.Tensor((B, S, H, P), BF16),
        q_bias: T.Tensor((H, R, N), BF16),
        zeta: T.Tensor((H, R, P), F32),
        phi: T.Tensor((H, R, P), F32),
        cs: T.Tensor((B, H, S, 2 * A), F16),
        wq: T.Tensor((B, H, S), F32),
        local: T.Tensor((B, H, K, N, P), F32),
    ):
        with T.Kernel(H, K, B, threads=threads) as (h, sc, b):
            q_s = T.alloc_shared((M, N), BF16)
            g_s = T.alloc_shared((M, P), BF16)
            acc = T.alloc_fragment((N, P), F32)
            T.clear(acc)
            for ic in T.serial(T.min(L // C, S // C - sc * (L // C))):
                t0 = sc * L + ic * C
                rotated(q_s, q, q_bias, cs, b, h, t0)
                for i, p in T.Parallel(M, P):
                    half_u = 0.5 * f32(z[b, t0 + i % C, h, p]) * zeta[h, i // C, p]
                    gate = (half_u * T.tanh(half_u) + half_u) * phi[h, i // C, p]
                    g_s[i, p] = bf16(f32(do[b, t0 + i % C, h, p]) * wq[b, h, t0 + i % C] * gate)
                T.gemm(q_s, g_s, acc, transpose_A=True)
            T.copy(acc, local[b, h, sc, :, :])

    return b1_local_gradients


def chunk_states(s: ScanShape, *, threads: int = 128) -> Any:
    """B2: the state that enters every chunk, bf16 [B,H,S/C,N,P], from those that enter the super-chunks."""
    B, S, H, G, N, P, R, A, C, M, L, K = s.B, s.S, s.H, s.G, s.N, s.P, s.R, s.A, s.C, s.M, s.L, s.K
    rotated = make_rotated(s)

    @T.prim_func
    def b2_chunk_states(
        k: T.Tensor((B, S, R, G, N), BF16),
        v: T.Tensor((B, S, H, P), BF16),
        k_bias: T.Tensor((H, R, N), BF16),
        psi: T.Tensor((H, R, P), F32),
        cs: T.Tensor((B, H, S, 2 * A), F16),
        lc: T.Tensor((B, H, S), F32),
        sk: T.Tensor((B, H, S), F32),
        start: T.Tensor((B, H, K, N, P), F32),
        states: T.Tensor((B, H, S // C, N, P), BF16),
    ):
        with T.Kernel(H, K, B, threads=threads) as (h, sc, b):
            k_s = T.alloc_shared((M, N), BF16)
            x_s = T.alloc_shared((M, P), BF16)
            h_s = T.alloc_shared((N, P), BF16)
            state = T.alloc_fragment((N, P), F32)
            T.copy(start[b, h, sc, :, :], state)
            for ic in T.serial(T.min(L // C, S // C - sc * (L // C))):
                t0 = sc * L + ic * C
                last = t0 + C - 1
                T.copy(state, h_s)
                T.copy(h_s, states[b, h, sc * (L // C) + ic, :, :])
                rotated(k_s, k, k_bias, cs, b, h, t0)
                for i, p in T.Parallel(M, P):
                    weight = T.exp2(lc[b, h, last] - lc[b, h, t0 + i % C]) * sk[b, h, t0 + i % C]
                    x_s[i, p] = bf16(f32(v[b, t0 + i % C, h, p]) * weight * psi[h, i // C, p])
                for n, p in T.Parallel(N, P):
                    state[n, p] = state[n, p] * T.exp2(lc[b, h, last])
                T.gemm(k_s, x_s, state, transpose_A=True)

    return b2_chunk_states


def gradients(s: ScanShape, *, threads: int = 128) -> Any:
    """B3: walk the chunks of a super-chunk backwards from E and write every gradient or its partial sum.

    dqh, dkh bf16 [B,S,R,H,N] per head; dv, dz bf16; dtheta fp32 [B,H,S,A] with respect to the cumulated angle; per
    row sums `row_q`, `row_k` = <q~, dq~>, <k~, dk~> and `same` = d/dgamma of the same step, fp32 [B,H,S]; partial sums
    over one super-chunk `p_psi`, `p_zeta`, `p_phi` [B,K,H,R,P] and `p_d` [B,K,H].
    """
    B, S, H, G, N, P, R, A, C, M, L, K = s.B, s.S, s.H, s.G, s.N, s.P, s.R, s.A, s.C, s.M, s.L, s.K
    rotated, unrotated, column_sums = make_rotated(s), make_unrotated(s), make_column_sums(s)

    @T.prim_func
    def b3_gradients(
        q: T.Tensor((B, S, R, G, N), BF16),
        k: T.Tensor((B, S, R, G, N), BF16),
        v: T.Tensor((B, S, H, P), BF16),
        z: T.Tensor((B, S, H, P), BF16),
        do: T.Tensor((B, S, H, P), BF16),
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
        states: T.Tensor((B, H, S // C, N, P), BF16),
        leaving: T.Tensor((B, H, K, N, P), F32),
        dqh: T.Tensor((B, S, R, H, N), BF16),
        dkh: T.Tensor((B, S, R, H, N), BF16),
        dv: T.Tensor((B, S, H, P), BF16),
        dz: T.Tensor((B, S, H, P), BF16),
        dtheta: T.Tensor((B, H, S, A), F32),
        row_q: T.Tensor((B, H, S), F32),
        row_k: T.Tensor((B, H, S), F32),
        same: T.Tensor((B, H, S), F32),
        p_psi: T.Tensor((B, K, H, R, P), F32),
        p_zeta: T.Tensor((B, K, H, R, P), F32),
        p_phi: T.Tensor((B, K, H, R, P), F32),
        p_d: T.Tensor((B, K, H), F32),
    ):
        with T.Kernel(H, K, B, threads=threads) as (h, sc, b):
            q_s = T.alloc_shared((M, N), BF16)
            k_s = T.alloc_shared((M, N), BF16)
            x_s = T.alloc_shared((M, P), BF16)
            g_s = T.alloc_shared((M, P), BF16)
            gw_s = T.alloc_shared((M, P), BF16)
            h_s = T.alloc_shared((N, P), BF16)
            e_s = T.alloc_shared((N, P), BF16)
            mix_s = T.alloc_shared((M, M), BF16)
            dmix_s = T.alloc_shared((M, M), BF16)
            w_s = T.alloc_shared((C, C), F32)
            stage_s = T.alloc_shared((M, max(N, P) + 8), F32)
            turn_s = T.alloc_shared((M, A), F32)
            row_s = T.alloc_shared((3, M), F32)
            E = T.alloc_fragment((N, P), F32)
            score = T.alloc_fragment((M, M), F32)
            dscore = T.alloc_fragment((M, M), F32)
            y = T.alloc_fragment((M, P), F32)
            dn = T.alloc_fragment((M, N), F32)
            row = T.alloc_fragment((M,), F32)
            d_row = T.alloc_fragment((M,), F32)
            total = T.alloc_fragment((1,), F32)
            psi_acc = T.alloc_fragment((M, P), F32)
            zeta_acc = T.alloc_fragment((M, P), F32)
            phi_acc = T.alloc_fragment((M, P), F32)
            T.copy(leaving[b, h, sc, :, :], E)
            T.clear(psi_acc)
            T.clear(zeta_acc)
            T.clear(phi_acc)
            T.clear(d_row)
            nc = T.min(L // C, S // C - sc * (L // C))
            for back in T.serial(nc):
                chunk = sc * (L // C) + nc - 1 - back
                t0 = chunk * C
                last = t0 + C - 1
                T.copy(E, e_s)
                T.copy(states[b, h, chunk, :, :], h_s)
                rotated(q_s, q, q_bias, cs, b, h, t0)
                rotated(k_s, k, k_bias, cs, b, h, t0)
                for i, p in T.Parallel(M, P):
                    x_s[i, p] = bf16(f32(v[b, t0 + i % C, h, p]) * psi[h, i // C, p])
                for t, u in T.Parallel(C, C):
                    decay = T.exp2(T.min(lc[b, h, t0 + t] - lc[b, h, t0 + u], 0.0)) * sk[b, h, t0 + u]
                    w_s[t, u] = T.if_then_else(t > u, decay, T.if_then_else(t == u, gm[b, h, t0 + t], 0.0))
                # y again, for the gradients of the gate
                T.gemm(q_s, k_s, score, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(M, M):
                    mix_s[i, j] = bf16(score[i, j] * w_s[i % C, j % C] + T.if_then_else(i == j, D[h], 0.0))
                T.gemm(q_s, h_s, y, clear_accum=True)
                for i, p in T.Parallel(M, P):
                    y[i, p] = y[i, p] * T.exp2(lc[b, h, t0 + i % C])
                T.gemm(mix_s, x_s, y)
                for i, p in T.Parallel(M, P):
                    zf = f32(z[b, t0 + i % C, h, p])
                    u = zf * zeta[h, i // C, p]
                    sig = 0.5 * T.tanh(0.5 * u) + 0.5
                    doy = f32(do[b, t0 + i % C, h, p]) * y[i, p]
                    g = f32(do[b, t0 + i % C, h, p]) * phi[h, i // C, p] * u * sig
                    du = doy * phi[h, i // C, p] * sig * (1.0 + u * (1.0 - sig))
                    phi_acc[i, p] += doy * u * sig
                    zeta_acc[i, p] += du * zf
                    stage_s[i, p] = du * zeta[h, i // C, p]
                    g_s[i, p] = bf16(g)
                    gw_s[i, p] = bf16(g * T.exp2(lc[b, h, t0 + i % C]))
                for c, p in T.Parallel(C, P):
                    dz[b, t0 + c, h, p] = bf16(rank_sum(stage_s, c, p, R, C))
                # gradient of the scores
                T.gemm(g_s, x_s, dscore, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(M, M):
                    dmix_s[i, j] = bf16(dscore[i, j] * w_s[i % C, j % C])
                for i, j in T.Parallel(M, M):
                    score[i, j] = T.if_then_else(i % C == j % C, score[i, j] * dscore[i, j], 0.0)
                    dscore[i, j] = T.if_then_else(i == j, dscore[i, j], 0.0)
                T.reduce_sum(dscore, d_row, dim=1, clear=False)
                T.reduce_sum(score, row, dim=1)
                T.copy(row, row_s[2, :])
                # q
                T.gemm(g_s, h_s, dn, transpose_B=True, clear_accum=True)
                for i, n in T.Parallel(M, N):
                    dn[i, n] = dn[i, n] * T.exp2(lc[b, h, t0 + i % C])
                T.gemm(dmix_s, k_s, dn)
                T.copy(dn, stage_s[:, 0:N])
                for i, n in T.Parallel(M, N):
                    dn[i, n] = dn[i, n] * f32(q_s[i, n])
                T.reduce_sum(dn, row, dim=1)
                T.copy(row, row_s[0, :])
                for i, j in T.Parallel(M, A):
                    turn_s[i, j] = stage_s[i, N // 2 + j] * f32(q_s[i, j]) - stage_s[i, j] * f32(q_s[i, N // 2 + j])
                unrotated(dqh, stage_s, cs, b, h, t0)
                # k
                T.gemm(x_s, e_s, dn, transpose_B=True, clear_accum=True)
                for i, n in T.Parallel(M, N):
                    weight = T.exp2(lc[b, h, last] - lc[b, h, t0 + i % C]) * sk[b, h, t0 + i % C]
                    dn[i, n] = dn[i, n] * weight
                T.gemm(dmix_s, q_s, dn, transpose_A=True)
                T.copy(dn, stage_s[:, 0:N])
                for i, n in T.Parallel(M, N):
                    dn[i, n] = dn[i, n] * f32(k_s[i, n])
                T.reduce_sum(dn, row, dim=1)
                T.copy(row, row_s[1, :])
                for i, j in T.Parallel(M, A):
                    turn_s[i, j] += stage_s[i, N // 2 + j] * f32(k_s[i, j]) - stage_s[i, j] * f32(k_s[i, N // 2 + j])
                unrotated(dkh, stage_s, cs, b, h, t0)
                for c, j in T.Parallel(C, A):
                    dtheta[b, h, t0 + c, j] = rank_sum(turn_s, c, j, R, C)
                for c in T.Parallel(C):
                    row_q[b, h, t0 + c] = row_sum(row_s, 0, c, R, C)
                    row_k[b, h, t0 + c] = row_sum(row_s, 1, c, R, C)
                    same[b, h, t0 + c] = row_sum(row_s, 2, c, R, C)
                # x
                T.gemm(k_s, e_s, y, clear_accum=True)
                for i, p in T.Parallel(M, P):
                    weight = T.exp2(lc[b, h, last] - lc[b, h, t0 + i % C]) * sk[b, h, t0 + i % C]
                    y[i, p] = y[i, p] * weight
                T.gemm(mix_s, g_s, y, transpose_A=True)
                for i, p in T.Parallel(M, P):
                    psi_acc[i, p] += y[i, p] * f32(v[b, t0 + i % C, h, p])
                    stage_s[i, p] = y[i, p] * psi[h, i // C, p]
                for c, p in T.Parallel(C, P):
                    dv[b, t0 + c, h, p] = bf16(rank_sum(stage_s, c, p, R, C))
                # E of the previous chunk
                for n, p in T.Parallel(N, P):
                    E[n, p] = E[n, p] * T.exp2(lc[b, h, last])
                T.gemm(q_s, gw_s, E, transpose_A=True)
            column_sums(p_psi, psi_acc, stage_s, b, sc, h)
            column_sums(p_zeta, zeta_acc, stage_s, b, sc, h)
            column_sums(p_phi, phi_acc, stage_s, b, sc, h)
            T.reduce_sum(d_row, total, dim=0)
            for one in T.Parallel(1):
                p_d[b, sc, h] = total[one]

    return b3_gradients
