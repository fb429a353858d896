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
    make_fetch,
    make_fetch_angles,
    make_rotated,
    make_scales,
    make_unrotated,
    make_weight_scales,
    make_weights,
    mixed_sum,
    pair_sum,
    rank_sum,
    row_sum,
)


def local_gradients(s: ScanShape, *, threads: int = 128) -> Any:
    """B1: local[b,h,k] = sum over the super-chunk of wq * q~ (x) g, fp32 [B,H,K,N,P]."""
    B, S, H, G, N, P, R, A, C, M, L, K = s.B, s.S, s.H, s.G, s.N, s.P, s.R, s.A, s.C, s.M, s.L, s.K
    fetch, fetch_angles, rotated, still = make_fetch(s), make_fetch_angles(s), make_rotated(s), max(1, N // 2 - A)

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
            q_s, g_s = T.alloc_shared((M, N), BF16), T.alloc_shared((M, P), BF16)
            bias_s = T.alloc_shared((R, N), BF16)
            zeta_s, phi_s = T.alloc_shared((R, P), F32), T.alloc_shared((R, P), F32)
            wq_s = T.alloc_shared((L,), F32)
            lo, hi = T.alloc_fragment((M, A), BF16), T.alloc_fragment((M, A), BF16)
            lo_still, hi_still = T.alloc_fragment((M, still), BF16), T.alloc_fragment((M, still), BF16)
            cos, sin = T.alloc_fragment((M, A), F16), T.alloc_fragment((M, A), F16)
            zf, df = T.alloc_fragment((C, P), BF16), T.alloc_fragment((C, P), BF16)
            z32, d32 = T.alloc_fragment((C, P), F32), T.alloc_fragment((C, P), F32)
            acc = T.alloc_fragment((N, P), F32)
            T.copy(q_bias[h, :, :], bias_s)
            for r, p in T.Parallel(R, P):
                zeta_s[r, p] = 0.5 * zeta[h, r, p]
                phi_s[r, p] = phi[h, r, p]
            T.copy(wq[b, h, sc * L : (sc + 1) * L], wq_s)
            T.clear(acc)
            nc = T.min(L // C, S // C - sc * (L // C))
            fetch(lo, hi, lo_still, hi_still, q, b, h, sc * L)
            fetch_angles(cos, sin, cs, b, h, sc * L)
            T.copy(z[b, sc * L : sc * L + C, h, :], zf)
            T.copy(do[b, sc * L : sc * L + C, h, :], df)
            for ic in T.serial(nc):
                t1 = sc * L + T.min(ic + 1, nc - 1) * C
                rotated(q_s, lo, hi, lo_still, hi_still, cos, sin, bias_s)
                for c, p in T.Parallel(C, P):
                    z32[c, p] = f32(zf[c, p])
                    d32[c, p] = f32(df[c, p]) * wq_s[ic * C + c]
                for r in T.unroll(R):
                    for c, p in T.Parallel(C, P):
                        half_u = z32[c, p] * zeta_s[r, p]
                        g_s[r * C + c, p] = bf16(d32[c, p] * (half_u * T.tanh(half_u) + half_u) * phi_s[r, p])
                fetch(lo, hi, lo_still, hi_still, q, b, h, t1)
                fetch_angles(cos, sin, cs, b, h, t1)
                T.copy(z[b, t1 : t1 + C, h, :], zf)
                T.copy(do[b, t1 : t1 + C, h, :], df)
                T.gemm(q_s, g_s, acc, transpose_A=True)
            T.copy(acc, local[b, h, sc, :, :])

    return b1_local_gradients


def chunk_states(s: ScanShape, *, threads: int = 128) -> Any:
    """B2: the state that enters every chunk, bf16 [B,H,S/C,N,P], from those that enter the super-chunks."""
    B, S, H, G, N, P, R, A, C, M, L, K = s.B, s.S, s.H, s.G, s.N, s.P, s.R, s.A, s.C, s.M, s.L, s.K
    fetch, fetch_angles, rotated, still = make_fetch(s), make_fetch_angles(s), make_rotated(s), max(1, N // 2 - A)
    scales = make_scales(s)

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
            k_s, x_s = T.alloc_shared((M, N), BF16), T.alloc_shared((M, P), BF16)
            h_s = T.alloc_shared((N, P), BF16)
            bias_s = T.alloc_shared((R, N), BF16)
            psi_s = T.alloc_shared((R, P), F32)
            read_s, write_s = T.alloc_shared((L,), F32), T.alloc_shared((L,), F32)
            lo, hi = T.alloc_fragment((M, A), BF16), T.alloc_fragment((M, A), BF16)
            lo_still, hi_still = T.alloc_fragment((M, still), BF16), T.alloc_fragment((M, still), BF16)
            cos, sin = T.alloc_fragment((M, A), F16), T.alloc_fragment((M, A), F16)
            vf, vw = T.alloc_fragment((C, P), BF16), T.alloc_fragment((C, P), F32)
            state = T.alloc_fragment((N, P), F32)
            T.copy(k_bias[h, :, :], bias_s)
            T.copy(psi[h, :, :], psi_s)
            scales(read_s, write_s, lc, sk, b, h, sc)
            T.copy(start[b, h, sc, :, :], state)
            nc = T.min(L // C, S // C - sc * (L // C))
            fetch(lo, hi, lo_still, hi_still, k, b, h, sc * L)
            fetch_angles(cos, sin, cs, b, h, sc * L)
            T.copy(v[b, sc * L : sc * L + C, h, :], vf)
            for ic in T.serial(nc):
                t1 = sc * L + T.min(ic + 1, nc - 1) * C
                T.copy(state, h_s)
                for n, p in T.Parallel(N, P):
                    state[n, p] = state[n, p] * read_s[ic * C + C - 1]
                rotated(k_s, lo, hi, lo_still, hi_still, cos, sin, bias_s)
                for c, p in T.Parallel(C, P):
                    vw[c, p] = f32(vf[c, p]) * write_s[ic * C + c]
                for r in T.unroll(R):
                    for c, p in T.Parallel(C, P):
                        x_s[r * C + c, p] = bf16(vw[c, p] * psi_s[r, p])
                fetch(lo, hi, lo_still, hi_still, k, b, h, t1)
                fetch_angles(cos, sin, cs, b, h, t1)
                T.copy(v[b, t1 : t1 + C, h, :], vf)
                T.gemm(k_s, x_s, state, transpose_A=True)
                T.copy(h_s, states[b, h, sc * (L // C) + ic, :, :])

    return b2_chunk_states


def gradients(s: ScanShape, *, threads: int = 128) -> Any:
    """B3: walk the chunks of a super-chunk backwards from E and write every gradient or its partial sum.

    dqh, dkh bf16 [B,S,R,H,N] per head; dv, dz bf16; dtheta fp32 [B,H,S,A] with respect to the cumulated angle; per
    token `row_q`, `row_k` = <q~, dq~>, <k~, dk~> with the share `diag` of the same step in both, and `same` = d/dgamma
    of the same step, fp32 [B,H,S]. y is linear in q~ and bilinear in k~ and x, so the first two are <g, y> and <x, dx>.
    Partial sums over one super-chunk `p_psi`, `p_zeta`, `p_phi` [B,K,H,R,P] and `p_d` [B,K,H]; p_zeta still lacks its factor phi.
    """
    B, S, H, G, N, P, R, A, C, M, L, K = s.B, s.S, s.H, s.G, s.N, s.P, s.R, s.A, s.C, s.M, s.L, s.K
    fetch, fetch_angles, rotated, still = make_fetch(s), make_fetch_angles(s), make_rotated(s), max(1, N // 2 - A)
    unrotated, column_sums = make_unrotated(s), make_column_sums(s)
    weight_scales, weights = make_weight_scales(s), make_weights(s)

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
        diag: T.Tensor((B, H, S), F32),
        p_psi: T.Tensor((B, K, H, R, P), F32),
        p_zeta: T.Tensor((B, K, H, R, P), F32),
        p_phi: T.Tensor((B, K, H, R, P), F32),
        p_d: T.Tensor((B, K, H), F32),
    ):
        with T.Kernel(H, K, B, threads=threads) as (h, sc, b):
            q_s, k_s = T.alloc_shared((M, N), BF16), T.alloc_shared((M, N), BF16)
            x_s, g_s, gw_s = (T.alloc_shared((M, P), BF16) for _ in range(3))
            h_s, e_s = T.alloc_shared((N, P), BF16), T.alloc_shared((N, P), BF16)
            mix_s, dmix_s = T.alloc_shared((M, M), BF16), T.alloc_shared((M, M), BF16)
            w_s = T.alloc_shared((C, C), F32)
            stage_s = T.alloc_shared((M, max(N, P) + 8), F32)
            turn_s = T.alloc_shared((M, A), F32)
            row_s = T.alloc_shared((5, M), F32)
            same_s, dsame_s = T.alloc_shared((M, R), F32), T.alloc_shared((M, R), F32)
            v_s, z_s, do_s = (T.alloc_shared((C, P + 8), BF16) for _ in range(3))
            cs_s = T.alloc_shared((C, 2 * A), F16)
            qb_s, kb_s = T.alloc_shared((R, N), BF16), T.alloc_shared((R, N), BF16)
            psi_s, half_zeta_s, phi_s, phi_zeta_s = (T.alloc_shared((R, P), F32) for _ in range(4))
            lc_s, sk_s, gm_s, read_s, write_s = (T.alloc_shared((L,), F32) for _ in range(5))
            q_lo, q_hi, k_lo, k_hi = (T.alloc_fragment((M, A), BF16) for _ in range(4))
            q_lo_still, q_hi_still, k_lo_still, k_hi_still = (T.alloc_fragment((M, still), BF16) for _ in range(4))
            cos, sin = T.alloc_fragment((M, A), F16), T.alloc_fragment((M, A), F16)
            vf, zf, df = (T.alloc_fragment((C, P), BF16) for _ in range(3))
            v32 = T.alloc_fragment((C, P), F32)
            E = T.alloc_fragment((N, P), F32)
            score, dscore = T.alloc_fragment((M, M), F32), T.alloc_fragment((M, M), F32)
            y, dn = T.alloc_fragment((M, P), F32), T.alloc_fragment((M, N), F32)
            row, d_row = T.alloc_fragment((M,), F32), T.alloc_fragment((M,), F32)
            total = T.alloc_fragment((1,), F32)
            skip = T.alloc_local((1,), F32)
            psi_acc, zeta_acc, phi_acc = (T.alloc_fragment((M, P), F32) for _ in range(3))
            T.copy(q_bias[h, :, :], qb_s)
            T.copy(k_bias[h, :, :], kb_s)
            for r, p in T.Parallel(R, P):
                psi_s[r, p] = psi[h, r, p]
                half_zeta_s[r, p] = 0.5 * zeta[h, r, p]
                phi_s[r, p] = phi[h, r, p]
                phi_zeta_s[r, p] = phi[h, r, p] * zeta[h, r, p]
            weight_scales(lc_s, sk_s, gm_s, read_s, write_s, lc, sk, gm, b, h, sc)
            T.copy(leaving[b, h, sc, :, :], E)
            skip[0] = D[h]
            T.clear(psi_acc)
            T.clear(zeta_acc)
            T.clear(phi_acc)
            T.clear(d_row)
            nc = T.min(L // C, S // C - sc * (L // C))
            for back in T.serial(nc):
                at = (nc - 1 - back) * C
                t0 = sc * L + at
                fetch(q_lo, q_hi, q_lo_still, q_hi_still, q, b, h, t0)
                fetch(k_lo, k_hi, k_lo_still, k_hi_still, k, b, h, t0)
                fetch_angles(cos, sin, cs, b, h, t0)
                T.copy(v[b, t0 : t0 + C, h, :], vf)
                T.copy(z[b, t0 : t0 + C, h, :], zf)
                T.copy(do[b, t0 : t0 + C, h, :], df)
                T.copy(cs[b, h, t0 : t0 + C, :], cs_s)
                T.copy(states[b, h, t0 // C, :, :], h_s)
                T.copy(E, e_s)
                rotated(q_s, q_lo, q_hi, q_lo_still, q_hi_still, cos, sin, qb_s)
                rotated(k_s, k_lo, k_hi, k_lo_still, k_hi_still, cos, sin, kb_s)
                T.copy(vf, v32)
                for r in T.unroll(R):
                    for c, p in T.Parallel(C, P):
                        x_s[r * C + c, p] = bf16(v32[c, p] * psi_s[r, p])
                T.copy(vf, v_s[:, 0:P])
                T.copy(zf, z_s[:, 0:P])
                T.copy(df, do_s[:, 0:P])
                weights(w_s, lc_s, sk_s, gm_s, at)
                # y again, for the gradients of the gate
                T.gemm(q_s, k_s, score, transpose_B=True, clear_accum=True)
                T.gemm(q_s, h_s, y, clear_accum=True)
                for i, j in T.Parallel(M, M):
                    mix_s[i, j] = bf16(score[i, j] * w_s[i % C, j % C] + T.if_then_else(i == j, skip[0], 0.0))
                for i, j in T.Parallel(M, M):
                    if i % C == j % C:
                        same_s[i, j // C] = score[i, j]
                for i, p in T.Parallel(M, P):
                    y[i, p] = y[i, p] * read_s[at + i % C]
                T.gemm(mix_s, x_s, y)
                for i, p in T.Parallel(M, P):
                    z32 = f32(z_s[i % C, p])
                    d32 = f32(do_s[i % C, p])
                    half_u = z32 * half_zeta_s[i // C, p]
                    bent = T.tanh(half_u)
                    silu = half_u * bent + half_u
                    slope = silu * (0.5 - 0.5 * bent) + (0.5 + 0.5 * bent)
                    open_ = d32 * silu
                    g = open_ * phi_s[i // C, p]
                    du = d32 * y[i, p] * slope
                    phi_acc[i, p] += open_ * y[i, p]
                    zeta_acc[i, p] += du * z32
                    stage_s[i, p] = du * phi_zeta_s[i // C, p]
                    g_s[i, p] = bf16(g)
                    gw_s[i, p] = bf16(g * read_s[at + i % C])
                    y[i, p] = g * y[i, p]
                T.reduce_sum(y, row, dim=1)
                T.copy(row, row_s[0, :])
                for c, p in T.Parallel(C, P):
                    dz[b, t0 + c, h, p] = bf16(rank_sum(stage_s, c, p, R, C))
                # gradient of the scores
                T.gemm(g_s, x_s, dscore, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(M, M):
                    dmix_s[i, j] = bf16(dscore[i, j] * w_s[i % C, j % C])
                for i, j in T.Parallel(M, M):
                    if i % C == j % C:
                        dsame_s[i, j // C] = dscore[i, j]
                # q
                T.gemm(g_s, h_s, dn, transpose_B=True, clear_accum=True)
                for i, n in T.Parallel(M, N):
                    dn[i, n] = dn[i, n] * read_s[at + i % C]
                T.gemm(dmix_s, k_s, dn)
                T.copy(dn, stage_s[:, 0:N])
                for i, j in T.Parallel(M, A):
                    turn_s[i, j] = stage_s[i, N // 2 + j] * f32(q_s[i, j]) - stage_s[i, j] * f32(q_s[i, N // 2 + j])
                unrotated(dqh, stage_s, cs_s, b, h, t0)
                # k
                T.gemm(x_s, e_s, dn, transpose_B=True, clear_accum=True)
                for i, n in T.Parallel(M, N):
                    dn[i, n] = dn[i, n] * write_s[at + i % C]
                T.gemm(dmix_s, q_s, dn, transpose_A=True)
                T.copy(dn, stage_s[:, 0:N])
                for i, j in T.Parallel(M, A):
                    turn_s[i, j] += stage_s[i, N // 2 + j] * f32(k_s[i, j]) - stage_s[i, j] * f32(k_s[i, N // 2 + j])
                unrotated(dkh, stage_s, cs_s, b, h, t0)
                # x
                T.gemm(k_s, e_s, y, clear_accum=True)
                for i, p in T.Parallel(M, P):
                    y[i, p] = y[i, p] * write_s[at + i % C]
                T.gemm(mix_s, g_s, y, transpose_A=True)
                for i, p in T.Parallel(M, P):
                    psi_acc[i, p] += y[i, p] * f32(v_s[i % C, p])
                    y[i, p] = y[i, p] * psi_s[i // C, p]
                    stage_s[i, p] = y[i, p]
                    y[i, p] = y[i, p] * f32(v_s[i % C, p])
                T.reduce_sum(y, row, dim=1)
                T.copy(row, row_s[1, :])
                for c, p in T.Parallel(C, P):
                    dv[b, t0 + c, h, p] = bf16(rank_sum(stage_s, c, p, R, C))
                for c, j in T.Parallel(C, A):
                    dtheta[b, h, t0 + c, j] = rank_sum(turn_s, c, j, R, C)
                for i in T.Parallel(M):
                    row_s[2, i] = pair_sum(same_s, dsame_s, i, R)
                    row_s[3, i] = mixed_sum(mix_s, dsame_s, i, R, C)
                    row_s[4, i] = dsame_s[i, i // C]
                for c in T.Parallel(C):
                    row_q[b, h, t0 + c] = row_sum(row_s, 0, c, R, C)
                    row_k[b, h, t0 + c] = row_sum(row_s, 1, c, R, C)
                    same[b, h, t0 + c] = row_sum(row_s, 2, c, R, C)
                    diag[b, h, t0 + c] = row_sum(row_s, 3, c, R, C)
                for i in T.Parallel(M):
                    d_row[i] += row_s[4, i]
                # E of the previous chunk
                for n, p in T.Parallel(N, P):
                    E[n, p] = E[n, p] * read_s[at + C - 1]
                T.gemm(q_s, gw_s, E, transpose_A=True)
            column_sums(p_psi, psi_acc, stage_s, b, sc, h)
            column_sums(p_zeta, zeta_acc, stage_s, b, sc, h)
            column_sums(p_phi, phi_acc, stage_s, b, sc, h)
            T.reduce_sum(d_row, total, dim=0)
            for one in T.Parallel(1):
                p_d[b, sc, h] = total[one]

    return b3_gradients
