"""Backward kernel of the walk: one reverse pass over each super-chunk yields every gradient.

E is the gradient of the loss with respect to the state that leaves a chunk, g = dO * phi * silu(u) that with respect
to y, u = z * zeta. Rows are (rank, time), i = r * C + c. Letters: see shape.py; scalars per token: see prefix.py.
"""

# TileLang programs: tensors are positional and annotated with calls, `T` is the language's own name, bodies are long.
# ruff: noqa: C901, N812, PLR0912, PLR0913, PLR0915, PLR0917
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
    make_expanded,
    make_factor,
    make_fetch,
    make_load,
    make_rotated_shared,
    make_unrotated,
    make_weight_scales,
    make_weights,
    mixed_sum,
    pair_sum,
    rank_sum,
    row_sum,
)


def gradients(s: ScanShape, *, threads: int = 128) -> Any:
    """B3: walk the chunks of a super-chunk backwards from E and write every gradient or its partial sum.

    dqh, dkh bf16 [B,S,R,H,N] per head; dv, dz bf16; dtheta fp32 [B,H,S,A] with respect to the cumulated angle; per
    token `row_q`, `row_k` = <q~, dq~>, <k~, dk~> with the share `diag` of the same step in both, and `same` = d/dgamma
    of the same step, fp32 [B,H,S]. y is linear in q~
    and bilinear in k~ and x, so the first two are <g, y> and <x, dx>.
    Partial sums over one super-chunk: `p_psi`, `p_zeta` (still without its factor phi), `p_phi` [B,K,H,M/8,P], one per
    8 rows, and `p_d` [B,K,H].
    """
    B, S, H, G, N, P, R, A, C, M, L, K = s.B, s.S, s.H, s.G, s.N, s.P, s.R, s.A, s.C, s.M, s.L, s.K
    load, rotated = make_load(s), make_rotated_shared(s, threads)
    unrotated, fetch, expanded = make_unrotated(s, threads), make_fetch(s), make_expanded(s, threads)
    factor, step, turns = make_factor(s), 4 * threads // P, A * M // (8 * threads)
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
        cs: T.Tensor((B, H, S // C, A // 4, C, 8), F16),
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
        p_psi: T.Tensor((B, K, H, M // 8, P), F32),
        p_zeta: T.Tensor((B, K, H, M // 8, P), F32),
        p_phi: T.Tensor((B, K, H, M // 8, P), F32),
        p_d: T.Tensor((B, K, H), F32),
    ):
        with T.Kernel(H, K, B, threads=threads) as (h, sc, b):
            q_raw, k_raw = T.alloc_shared((M, N), BF16), T.alloc_shared((M, N), BF16)
            q_s, k_s = T.alloc_shared((M, N), BF16), T.alloc_shared((M, N), BF16)
            x_s, g_s = T.alloc_shared((M, P), BF16), T.alloc_shared((M, P), BF16)
            h_s, e_s = T.alloc_shared((N, P), BF16), T.alloc_shared((N, P), BF16)
            mix_s, dmix_s = T.alloc_shared((M, M), BF16), T.alloc_shared((M, M), BF16)
            w_s = T.alloc_shared((C, C + 8), F32)
            turn_s = T.alloc_shared((M, A + 4), F32)
            row_s = T.alloc_shared((5, M), F32)
            same_s, dsame_s = T.alloc_shared((M, R), F32), T.alloc_shared((M, R), F32)
            v_s = T.alloc_shared((2 * C, P), BF16)
            z_s, do_s = T.alloc_shared((C, P), BF16), T.alloc_shared((C, P), BF16)
            cs_s = T.alloc_shared((2 * (A // 4), C, 8), F16)
            qb_s, kb_s = T.alloc_shared((1, R, N), BF16), T.alloc_shared((1, R, N), BF16)
            psi_s, half_zeta_s, phi_s, phi_zeta_s = (T.alloc_shared((R, P), F32) for _ in range(4))
            lc_s, sk_s, gm_s, read_s, write_s = (T.alloc_shared((L,), F32) for _ in range(5))
            psi_l = T.alloc_local((4 * R,), F32)
            bar = T.alloc_barrier([threads])
            cos, sin = (T.alloc_local((A * M // threads,), F16) for _ in range(2))
            turn = T.alloc_local((A * M // threads,), F32)
            v_l = T.alloc_local((C // step * 4,), BF16)
            one = T.alloc_local((C // step,), F32)
            E = T.alloc_fragment((N, P), F32)
            score, dscore = T.alloc_fragment((M, M), F32), T.alloc_fragment((M, M), F32)
            y, dn = T.alloc_fragment((M, P), F32), T.alloc_fragment((M, N), F32)
            g, gw, dgate = (T.alloc_fragment((M, P), BF16) for _ in range(3))
            row, d_row = T.alloc_fragment((M,), F32), T.alloc_fragment((M,), F32)
            total = T.alloc_fragment((1,), F32)
            skip = T.alloc_local((1,), F32)
            psi_acc, zeta_acc, phi_acc = (T.alloc_fragment((M, P), F32) for _ in range(3))
            T.annotate_layout({t: make_swizzled_layout(t) for t in (q_raw, k_raw, v_s, z_s, do_s)})
            tx = T.get_thread_binding()
            nc = T.min(L // C, S // C - sc * (L // C))
            first = sc * L + (nc - 1) * C
            load(q_raw, q, bar, b, h, first)
            load(k_raw, k, bar, b, h, first)
            fetch(h_s, v_s, z_s, do_s, cs_s, states, v, z, do, cs, bar, b, h, first, 0)
            T.mbarrier_arrive(bar[0])
            T.copy(q_bias[h : h + 1, :, :], qb_s)
            T.copy(k_bias[h : h + 1, :, :], kb_s)
            for r, p in T.Parallel(R, P):
                psi_s[r, p] = psi[h, r, p]
                half_zeta_s[r, p] = 0.5 * zeta[h, r, p]
                phi_s[r, p] = phi[h, r, p]
                phi_zeta_s[r, p] = phi[h, r, p] * zeta[h, r, p]
            weight_scales(lc_s, sk_s, gm_s, read_s, write_s, lc, sk, gm, b, h, sc)
            T.copy(leaving[b, h, sc, :, :], E)
            skip[0] = D[h]
            for u in T.unroll(C // step):
                one[u] = 1.0
            T.clear(psi_acc)
            T.clear(zeta_acc)
            T.clear(phi_acc)
            T.clear(d_row)
            for back in T.serial(nc):
                at = (nc - 1 - back) * C
                t0 = sc * L + at
                slot = back % 2
                T.mbarrier_wait_parity(bar[0], slot)
                for u in T.unroll(turns):
                    for e in T.vectorized(8):
                        cos[u * 8 + e] = cs_s[slot * (A // 4) + (tx // M + u * (threads // M)) * 2, tx % C, e]
                    for e in T.vectorized(8):
                        sin[u * 8 + e] = cs_s[slot * (A // 4) + (tx // M + u * (threads // M)) * 2 + 1, tx % C, e]
                for u in T.unroll(C // step):
                    for e in T.vectorized(4):
                        v_l[u * 4 + e] = v_s[slot * C + u * step + tx // (P // 4), tx % (P // 4) * 4 + e]
                T.copy(E, e_s)
                weights(w_s, lc_s, sk_s, gm_s, at)
                factor(psi_l, psi, h, tx)
                expanded(x_s, v_l, one, psi_l, tx)
                rotated(q_s, q_raw, qb_s, cos, sin, tx)
                rotated(k_s, k_raw, kb_s, cos, sin, tx)
                # y again, for the gradients of the gate
                T.wgmma_gemm(q_s, k_s, score, transpose_B=True, clear_accum=True)
                T.gemm(q_s, h_s, y, clear_accum=True)
                T.warpgroup_fence_operand(score, num_regs=M * M // threads)
                for i, j in T.Parallel(M, M):
                    if i % C == j % C:
                        same_s[i, j // C] = score[i, j]
                for i, j in T.Parallel(M, M):
                    score[i, j] = score[i, j] * w_s[i % C, j % C] + T.if_then_else(i == j, skip[0], 0.0)
                T.copy(score, mix_s)
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
                    gated = d32 * silu
                    du = d32 * y[i, p] * slope
                    phi_acc[i, p] += gated * y[i, p]
                    zeta_acc[i, p] += du * z32
                    g32 = gated * phi_s[i // C, p]
                    g[i, p] = bf16(g32)
                    gw[i, p] = bf16(g32 * read_s[at + i % C])
                    dgate[i, p] = bf16(du * phi_zeta_s[i // C, p])
                    y[i, p] = g32 * y[i, p]
                T.copy(g, g_s)
                T.copy(gw, dmix_s)
                T.copy(dgate, q_raw)
                T.reduce_sum(y, row, dim=1)
                T.copy(row, row_s[0, :])
                for c, p in T.Parallel(C, P):
                    dz[b, t0 + c, h, p] = bf16(rank_sum(q_raw, c, p, R, C))
                # E of the previous chunk, then the gradient of the scores
                for n, p in T.Parallel(N, P):
                    E[n, p] = E[n, p] * read_s[at + C - 1]
                T.wgmma_gemm(q_s, dmix_s, E, transpose_A=True)
                T.gemm(g_s, x_s, dscore, transpose_B=True, clear_accum=True)
                T.warpgroup_fence_operand(E, num_regs=N * P // threads)
                for i, j in T.Parallel(M, M):
                    if i % C == j % C:
                        dsame_s[i, j // C] = dscore[i, j]
                for i, j in T.Parallel(M, M):
                    dscore[i, j] = dscore[i, j] * w_s[i % C, j % C]
                T.copy(dscore, dmix_s)
                # q
                T.gemm(g_s, h_s, dn, transpose_B=True, clear_accum=True)
                for i, n in T.Parallel(M, N):
                    dn[i, n] = dn[i, n] * read_s[at + i % C]
                T.gemm(dmix_s, k_s, dn)
                T.copy(dn, q_raw)
                for e in T.unroll(8 * turns):
                    turn[e] = 0.0
                unrotated(k_raw, q_raw, q_s, turn, cos, sin, tx)
                for r in T.unroll(R):
                    T.copy(k_raw[r * C : (r + 1) * C, :], dqh[b, t0 : t0 + C, r, h, :])
                # the next chunk may land while k and x are worked on
                T.sync_threads()
                ahead = sc * L + T.max(nc - 2 - back, 0) * C
                load(q_raw, q, bar, b, h, ahead)
                load(k_raw, k, bar, b, h, ahead)
                fetch(h_s, v_s, z_s, do_s, cs_s, states, v, z, do, cs, bar, b, h, ahead, 1 - slot)
                T.mbarrier_arrive(bar[0])
                # k
                T.gemm(x_s, e_s, dn, transpose_B=True, clear_accum=True)
                for i, n in T.Parallel(M, N):
                    dn[i, n] = dn[i, n] * write_s[at + i % C]
                T.gemm(dmix_s, q_s, dn, transpose_A=True)
                T.copy(dn, x_s)
                unrotated(q_s, x_s, k_s, turn, cos, sin, tx)
                for r in T.unroll(R):
                    T.copy(q_s[r * C : (r + 1) * C, :], dkh[b, t0 : t0 + C, r, h, :])
                for u in T.unroll(turns):
                    for e in T.vectorized(4):
                        turn_s[tx % M, (tx // M + u * (threads // M)) * 8 + e] = turn[u * 8 + e]
                    for e in T.vectorized(4):
                        turn_s[tx % M, (tx // M + u * (threads // M)) * 8 + 4 + e] = turn[u * 8 + 4 + e]
                # x
                T.gemm(k_s, e_s, y, clear_accum=True)
                for i, p in T.Parallel(M, P):
                    y[i, p] = y[i, p] * write_s[at + i % C]
                T.gemm(mix_s, g_s, y, transpose_A=True)
                for i, p in T.Parallel(M, P):
                    v32 = f32(v_s[slot * C + i % C, p])
                    psi_acc[i, p] += y[i, p] * v32
                    dx = y[i, p] * psi_s[i // C, p]
                    dgate[i, p] = bf16(dx)
                    y[i, p] = dx * v32
                T.copy(dgate, dmix_s)
                T.reduce_sum(y, row, dim=1)
                T.copy(row, row_s[1, :])
                for c, p in T.Parallel(C, P):
                    dv[b, t0 + c, h, p] = bf16(rank_sum(dmix_s, c, p, R, C))
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
            T.mbarrier_wait_parity(bar[0], nc % 2)
            # the 8 rows of an accumulator block lie in lanes 4 apart
            for lanes in (4, 8, 16):
                for i, p in T.Parallel(M, P):
                    psi_acc[i, p] += T.shfl_xor(psi_acc[i, p], lanes)
                    zeta_acc[i, p] += T.shfl_xor(zeta_acc[i, p], lanes)
                    phi_acc[i, p] += T.shfl_xor(phi_acc[i, p], lanes)
            for i, p in T.Parallel(M, P):
                if i % 8 == 0:
                    p_psi[b, sc, h, i // 8, p] = psi_acc[i, p]
                    p_zeta[b, sc, h, i // 8, p] = zeta_acc[i, p]
                    p_phi[b, sc, h, i // 8, p] = phi_acc[i, p]
            T.reduce_sum(d_row, total, dim=0)
            for last in T.Parallel(1):
                p_d[b, sc, h] = total[last]

    return b3_gradients
