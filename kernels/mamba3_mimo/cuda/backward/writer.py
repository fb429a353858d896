"""The writer of the walk with two roles: rotates k, builds x, carries the state's gradient E, yields dk and dv."""

# TileLang programs: tensors are positional and annotated with calls, `T` is the language's own name, bodies are long.
# ruff: noqa: C901, N812, PLR0912, PLR0915

from typing import Any

import tilelang.language as T

from kernels.mamba3_mimo.cuda.backward.edges import make_edge_from_tile
from kernels.mamba3_mimo.cuda.backward.places_split import first_of, lane_bytes, place, pool_of
from kernels.mamba3_mimo.cuda.backward.tiles_split import (
    G_FREE,
    G_READY,
    K_FREE,
    K_READY,
    Q_READY,
    TILE,
    arrive,
    load_tile,
    make_parts,
    make_rotation,
    product_rs,
    product_ss,
    rounded,
    store_tile,
)
from kernels.mamba3_mimo.cuda.host.machine import GROUP
from kernels.mamba3_mimo.cuda.host.shape import ScanShape
from kernels.mamba3_mimo.cuda.pieces import scalar
from kernels.mamba3_mimo.cuda.pieces.products import begin_batch, end_batch
from kernels.mamba3_mimo.cuda.pieces.tiles import BF16, F16, F32, bf16, f32


def make_pair_load(s: ScanShape) -> Any:
    """Return the macro that starts the copies of what both roles read of chunk n."""
    R, A, C = s.R, s.A, s.C
    NB = s.N // 64
    pool_at = pool_of(s)

    @T.macro
    def load_pair(block, given, n):
        b, h, pool, cs_s, sc_s, full = block.b, block.h, block.pool, block.cs_s, block.sc_s, block.full
        slot = n % 2
        third = n % 3
        t0 = (block.nc - 1 - n) * C
        for p in T.unroll(NB):
            T.tma_copy(
                given.q[b, t0 * R : t0 * R + 64, h // s.heads_per_group, p * 64 : p * 64 + 64],
                pool[pool_at.q + (slot * NB + p) * 64 : pool_at.q + (slot * NB + p) * 64 + 64, :],
                barrier=full[slot],
            )
            T.tma_copy(
                given.k[b, t0 * R : t0 * R + 64, h // s.heads_per_group, p * 64 : p * 64 + 64],
                pool[pool_at.k + (slot * NB + p) * 64 : pool_at.k + (slot * NB + p) * 64 + 64, :],
                barrier=full[slot],
            )
        v_rows = slice(pool_at.v + third * C, pool_at.v + third * C + C)
        T.tma_copy(given.v[b, t0 : t0 + C, h, :], pool[v_rows, :], barrier=full[slot])
        T.tma_copy(
            given.cs[b, h, t0 // C, :, :, :], cs_s[third * (A // 4) : (third + 1) * (A // 4), :, :],
            barrier=full[slot],
        )  # fmt: skip
        T.tma_copy(given.lc[b, h, t0 : t0 + C], sc_s[third, 0, :], barrier=full[slot])
        T.tma_copy(given.sk[b, h, t0 : t0 + C], sc_s[third, 1, :], barrier=full[slot])
        T.tma_copy(given.gm[b, h, t0 : t0 + C], sc_s[third, 2, :], barrier=full[slot])
        T.mbarrier_arrive(full[slot])

    return load_pair


def make_writer(s: ScanShape, *, started: bool) -> Any:
    """Return the macro of the second warp group; its parameters are named as in gradients_split.py.

    `started`: it writes the gradient of the state that enters the rows to `first`.
    """
    N, R, A, C = s.N, s.R, s.A, s.C
    NB, parts = N // 64, 8 // R
    pool_at = pool_of(s)
    all_k, some_k, half = tuple(range(4 * NB)), (*range(A // 16), *range(N // 32, N // 32 + A // 16)), tuple(range(4))
    rotated, unrotated = make_rotation(s)
    angles, biased, weighted, column, flushed = make_parts(s)
    load_pair, edge = make_pair_load(s), make_edge_from_tile(s, GROUP)

    @T.macro
    def writer(block, given, leaving, written):
        tx, b, h, nc, base, skip = block.tx, block.b, block.h, block.nc, block.base, block.skip
        full, hand, sc_s, w_s, wt_s = block.full, block.hand, block.sc_s, block.w_s, block.wt_s
        dv, first = written.dv, written.first
        w, g8, quad, q2, rank, row, side = place(tx, R)
        lane_at, time_at = lane_bytes(row, side), lane_bytes(row // R, side)
        c0 = (w * 16 + g8) // R
        t = tx - GROUP
        kl, xl, vl = T.alloc_local((N // 2,), BF16), T.alloc_local((32,), BF16), T.alloc_local((32,), BF16)
        el = T.alloc_local((N // 2,), BF16)
        kcos, ksin = T.alloc_local((A // 2,), F16), T.alloc_local((A // 2,), F16)
        dscore, dx = T.alloc_local((32,), F32), T.alloc_local((32,), F32)
        dk = T.alloc_local((N // 2,), F32)
        E = T.alloc_local((N // 2,), F32)
        kturn = T.alloc_local((A // 2,), F32)
        ksum = T.alloc_local((2,), F32)
        write = T.alloc_local((3,), F32)
        psi_acc = T.alloc_local((16,), F32)
        if t < 32:
            load_pair(block, given, 0)
            if nc > 1:
                load_pair(block, given, 1)
        for i in T.unroll(N // 4):
            for e in T.vectorized(2):
                E[i * 2 + e] = leaving[b, h, i // 16 * 64 + w * 16 + g8 + i % 2 * 8, i // 2 % 8 * 8 + q2 + e]
        for i in T.unroll(16):
            psi_acc[i] = 0.0
        for step in T.serial(nc + 1):
            # k and x of the next chunk, so that the reader never waits for them
            if step < nc:
                slot = step % 2
                third = step % 3
                T.mbarrier_wait_parity(full[slot], step // 2 % 2)
                angles(kcos, ksin, block.cs_s, third, c0, q2)
                load_tile(base + pool_at.k * 128 + slot * (NB * TILE), lane_at, kl, all_k)
                load_tile(base + pool_at.v * 128 + third * (C * 128), time_at, vl, half)
                biased(kl, block.bias_s, 1, rank, quad)
                rotated(kl, kcos, ksin)
                store_tile(base + pool_at.k * 128 + slot * (NB * TILE), lane_at, kl, all_k)
                for i in T.unroll(4):
                    ps = T.alloc_local((4,), F32)
                    column(ps, block.tab_s, 2, rank, quad, i)
                    for j in T.unroll(4):
                        for e in T.vectorized(2):
                            xl[i * 8 + j * 2 + e] = bf16(scalar.psiv(f32(vl[i * 8 + j * 2 + e]), ps[j // 2 * 2 + e]))
                store_tile(base + pool_at.x * 128 + slot * TILE, lane_at, xl, half)
                for i in T.unroll(-(-C * C // GROUP)):
                    if i * GROUP + t < C * C:
                        ct = (i * GROUP + t) // C
                        cu = (i * GROUP + t) % C
                        one = scalar.pair_weight(
                            ct, cu, sc_s[third, 0, ct], sc_s[third, 0, cu], sc_s[third, 1, cu], sc_s[third, 2, ct]
                        )
                        w_s[slot * C * C + ct * C + cu % parts * 8 + cu // parts] = one
                        wt_s[slot * C * C + cu * C + ct % parts * 8 + ct // parts] = one
                T.fence_proxy_async()
                arrive(hand, K_READY + slot, tx)
            if step > 0:
                n = step - 1
                slot = n % 2
                third = n % 3
                t0 = (nc - 1 - n) * C
                q_at = base + pool_at.q * 128 + slot * (NB * TILE)
                k_at = base + pool_at.k * 128 + slot * (NB * TILE)
                x_at = base + pool_at.x * 128 + slot * TILE
                e_at, g_at, gw_at = (base + first * 128 for first in (pool_at.e, pool_at.g, pool_at.gw))
                rounded(el, E, N // 2)
                if t < 32:
                    T.tma_store_wait(0)
                T.sync_threads(2, GROUP)
                store_tile(e_at, lane_at, el, all_k)
                T.fence_proxy_async()
                T.sync_threads(2, GROUP)
                edge(block.pool, pool_at.e, given.states, written.edges, b, h, t0 + C, t)
                write[2] = scalar.read_scale(sc_s[third, 0, C - 1])
                for rh in T.unroll(2):
                    write[rh] = scalar.write_scale(
                        sc_s[third, 0, C - 1], sc_s[third, 0, c0 + rh * parts], sc_s[third, 1, c0 + rh * parts]
                    )
                T.mbarrier_wait_parity(hand[Q_READY + slot], n // 2 % 2)
                begin_batch(dscore)
                product_ss(dscore, 0, k_at, True, q_at, 4 * NB, True, True)
                T.warpgroup_commit_batch()
                end_batch(0, dscore, dx)
                weighted(xl, dscore, wt_s, slot, c0, q2, w, skip, True)
                T.warpgroup_arrive()
                product_ss(dx, 0, k_at, True, e_at, 4 * NB, False, True)
                T.warpgroup_commit_batch()
                end_batch(0, dx)
                for i in T.unroll(32):
                    dx[i] = dx[i] * write[i // 2 % 2]
                for i in T.unroll(N // 2):
                    E[i] = E[i] * write[2]
                T.mbarrier_wait_parity(hand[G_READY], n % 2)
                begin_batch(xl, dx, E)
                product_rs(dx, 0, xl, g_at, 4, False, False)
                for p in tuple(range(NB)):
                    product_ss(E, 32 * p, q_at + p * TILE, False, gw_at, 4, False, False)
                T.warpgroup_commit_batch()
                end_batch(0, dx, E)
                # x
                ksum[0] = 0.0
                ksum[1] = 0.0
                for i in half:
                    ps = T.alloc_local((4,), F32)
                    load_tile(base + pool_at.v * 128 + third * (C * 128), time_at, vl, (i,))
                    column(ps, block.tab_s, 2, rank, quad, i)
                    for u in T.unroll(4):
                        own_dx = T.alloc_local((2,), F32)
                        for e in T.unroll(2):
                            v32 = f32(vl[i * 8 + u * 2 + e])
                            psi_acc[i * 4 + u // 2 * 2 + e] += dx[i * 8 + u * 2 + e] * v32
                            own_dx[e] = scalar.psiv(dx[i * 8 + u * 2 + e], ps[u // 2 * 2 + e])
                            ksum[u % 2] += dx[i * 8 + u * 2 + e] * f32(bf16(scalar.psiv(v32, ps[u // 2 * 2 + e])))
                        for e in T.vectorized(2):
                            vl[i * 8 + u * 2 + e] = bf16(own_dx[e])
                    T.call_extern("handle", f"walk::rank_sum_pairs<{R}>", T.access_ptr(vl[i * 8], "rw"))
                    for u in T.unroll(-(-4 // R)):
                        at = first_of(4, R, tx) + u
                        for e in T.vectorized(2):
                            dv[b, t0 + c0 + at % 2 * parts, h, i * 16 + at // 2 * 8 + q2 + e] = vl[i * 8 + u * 2 + e]
                begin_batch(dscore)
                product_ss(dscore, 0, x_at, True, g_at, 4, True, True)
                T.warpgroup_commit_batch()
                T.call_extern("handle", f"walk::time_sum<{R}, 1>", T.access_ptr(ksum[0], "rw"))
                if (quad < 2) & (rank == 0):
                    written.row_k[b, h, t0 + c0 + quad * parts] = ksum[0]
                end_batch(0, dscore)
                weighted(xl, dscore, wt_s, slot, c0, q2, w, skip, False)
                begin_batch(dk)
                for p in tuple(range(NB)):
                    product_ss(dk, 32 * p, x_at, True, e_at + p * TILE, 4, True, True)
                T.warpgroup_commit_batch()
                end_batch(0, dk)
                for i in T.unroll(N // 2):
                    dk[i] = dk[i] * write[i // 2 % 2]
                begin_batch(xl, dk)
                for p in tuple(range(NB)):
                    product_rs(dk, 32 * p, xl, q_at + p * TILE, 4, False, False)
                T.warpgroup_commit_batch()
                angles(kcos, ksin, block.cs_s, third, c0, q2)
                load_tile(k_at, lane_at, kl, some_k)
                end_batch(0, dk)
                arrive(hand, G_FREE, tx)
                # k
                unrotated(kl, dk, kl, kturn, kcos, ksin)
                T.call_extern("handle", f"walk::rank_sum<{R}, {A // 2}>", T.access_ptr(kturn[0], "rw"))
                T.mbarrier_wait_parity(hand[K_FREE + slot], n // 2 % 2)
                T.sync_threads(2, GROUP)
                store_tile(e_at, lane_at, kl, all_k)
                T.fence_proxy_async()
                for i in T.unroll(A // 2 // R):
                    at = first_of(A // 2, R, tx) + i
                    written.dtheta[b, h, t0 + c0 + at // 2 % 2 * parts, at // 4 * 8 + q2 + at % 2] = (
                        block.turn_s[slot, c0 + at // 2 % 2 * parts, at // 4 * 8 + q2 + at % 2] + kturn[i]
                    )
                T.sync_threads(2, GROUP)
                if t < 32:
                    for p in T.unroll(NB):
                        T.tma_copy(
                            block.pool[pool_at.e + p * 64 : pool_at.e + p * 64 + 64, :],
                            written.dkh[b, t0 * R : t0 * R + 64, h, p * 64 : p * 64 + 64],
                        )
                    if n + 2 < nc:
                        load_pair(block, given, n + 2)
        if started:
            for i in T.unroll(N // 4):
                for e in T.vectorized(2):
                    first[b, h, i // 16 * 64 + w * 16 + g8 + i % 2 * 8, i // 2 % 8 * 8 + q2 + e] = E[i * 2 + e]
        flushed(psi_acc, wt_s, written.p_psi, b, h, w, g8, quad, 2)
        if t < 32:
            T.tma_store_wait(0)
        rounded(el, E, N // 2)
        T.sync_threads(2, GROUP)
        store_tile(base + pool_at.e * 128, lane_at, el, all_k)
        T.sync_threads(2, GROUP)
        edge(block.pool, pool_at.e, given.states, written.edges, b, h, 0, t)

    return writer
