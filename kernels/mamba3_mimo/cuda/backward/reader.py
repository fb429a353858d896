"""The reader of the walk with two roles: rotates q, rebuilds y, takes the gate's gradient, yields dq and dz."""

# TileLang programs: tensors are positional and annotated with calls, `T` is the language's own name, bodies are long.
# ruff: noqa: C901, N812, PLR0912, PLR0913, PLR0915, PLR0917

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from kernels.mamba3_mimo.cuda.backward.places_split import first_of, lane_bytes, place, pool_of
from kernels.mamba3_mimo.cuda.backward.tiles_split import (
    G_FREE,
    G_READY,
    K_FREE,
    K_READY,
    Q_READY,
    TILE,
    arrive,
    load_part,
    load_tile,
    make_parts,
    make_rotation,
    product_rs,
    store_tile,
)
from kernels.mamba3_mimo.cuda.host.machine import GROUP
from kernels.mamba3_mimo.cuda.host.shape import ScanShape
from kernels.mamba3_mimo.cuda.pieces import scalar
from kernels.mamba3_mimo.cuda.pieces.products import begin_batch, end_batch
from kernels.mamba3_mimo.cuda.pieces.tiles import BF16, F16, F32, bf16, f32


@dataclass(frozen=True, kw_only=True)
class GateRegisters:
    """What a thread reads and writes for the gate and its gradients."""

    tab_s: Any
    """fp32 [3,R,80], in shared memory: zeta / 2, phi and psi of the head."""
    y: Any
    """fp32 [32]: the outputs before the gate."""
    read: Any
    """fp32 [2]: the read scales of the thread's two rows of 16."""
    zl: Any
    """bf16 [8]: z, then its gradient."""
    gl: Any
    """bf16 [32]: dO, then g; gw is g times `read`."""
    gw: Any
    sums: Any
    """fp32 [6]: <g, y> of the two rows in the first and the fourth."""
    zeta_acc: Any
    """fp32 [16]: partial sums of the gradient of zeta, still without phi; phi_acc those of phi's."""
    phi_acc: Any


def make_gate_gradient(s: ScanShape) -> Any:
    """Return macro(block, own, dz, t0, c0, rank, quad, q2, lane_at, time_at): from y, z and dO the gradients g and dz.

    Leaves g and g times the decay from the start of the chunk in the block's pool, and adds to the sums of `own`.
    """
    R, parts, pool_at = s.R, 8 // s.R, pool_of(s)
    column = make_parts(s).column

    @T.macro
    def gate(block, own, dz, t0, c0, rank, quad, q2, lane_at, time_at):
        own.sums[0] = 0.0
        own.sums[3] = 0.0
        for i in tuple(range(4)):
            hz, ph = T.alloc_local((4,), F32), T.alloc_local((4,), F32)
            g32, gd32 = T.alloc_local((2,), F32), T.alloc_local((2,), F32)
            load_part(block.base + pool_at.z * 128, time_at, own.zl, i)
            load_tile(block.base + pool_at.do * 128, time_at, own.gl, (i,))
            column(hz, own.tab_s, 0, rank, quad, i)
            column(ph, own.tab_s, 1, rank, quad, i)
            for u in T.unroll(4):
                for e in T.unroll(2):
                    z32 = f32(own.zl[u * 2 + e])
                    d32 = f32(own.gl[i * 8 + u * 2 + e])
                    half_u = z32 * hz[u // 2 * 2 + e]
                    bent = scalar.bent(half_u)
                    silu = scalar.silu(half_u, bent)
                    passed = scalar.sigmoid(bent)
                    slope = scalar.silu_slope_by(silu, passed)
                    gated = d32 * silu
                    du = d32 * own.y[i * 8 + u * 2 + e] * slope
                    own.phi_acc[i * 4 + u // 2 * 2 + e] += gated * own.y[i * 8 + u * 2 + e]
                    own.zeta_acc[i * 4 + u // 2 * 2 + e] += du * z32
                    g32[e] = gated * ph[u // 2 * 2 + e]
                    own.sums[u % 2 * 3] += f32(bf16(g32[e])) * own.y[i * 8 + u * 2 + e]
                    gd32[e] = du * (ph[u // 2 * 2 + e] * hz[u // 2 * 2 + e])
                for e in T.vectorized(2):
                    own.gl[i * 8 + u * 2 + e] = bf16(g32[e])
                for e in T.vectorized(2):
                    own.zl[u * 2 + e] = bf16(gd32[e] + gd32[e])
                for e in T.vectorized(2):
                    own.gw[i * 8 + u * 2 + e] = bf16(g32[e] * own.read[u % 2])
            T.call_extern("handle", f"walk::rank_sum_pairs<{R}>", T.access_ptr(own.zl[0], "rw"))
            for u in T.unroll(-(-4 // R)):
                at = first_of(4, R, block.tx) + u
                for e in T.vectorized(2):
                    dz[block.b, t0 + c0 + at % 2 * parts, block.h, i * 16 + at // 2 * 8 + q2 + e] = own.zl[u * 2 + e]
            store_tile(block.base + pool_at.g * 128, lane_at, own.gl, (i,))
            store_tile(block.base + pool_at.gw * 128, lane_at, own.gw, (i,))

    return gate


def make_reader(s: ScanShape) -> Any:
    """Return the macro of the first warp group; its parameters are named as in gradients_split.py."""
    N, R, A, C = s.N, s.R, s.A, s.C
    NB, parts = N // 64, 8 // R
    pool_at = pool_of(s)
    all_k, some_k, half = tuple(range(4 * NB)), (*range(A // 16), *range(N // 32, N // 32 + A // 16)), tuple(range(4))
    rotated, unrotated = make_rotation(s)
    angles, biased, weighted, _, flushed = make_parts(s)
    gate = make_gate_gradient(s)

    @T.macro
    def load_state(block, states, n):
        slot, full = n % 2, block.full
        for p in T.unroll(NB):
            T.tma_copy(
                states[block.b, block.h, block.nc - 1 - n, p * 64 : p * 64 + 64, :],
                block.pool[pool_at.h + (slot * NB + p) * 64 : pool_at.h + (slot * NB + p) * 64 + 64, :],
                barrier=full[2 + slot],
            )
        T.mbarrier_arrive(full[2 + slot])

    @T.macro
    def load_gate(block, given, n):
        t0 = (block.nc - 1 - n) * C
        b, h, pool, full = block.b, block.h, block.pool, block.full
        T.tma_copy(given.z[b, t0 : t0 + C, h, :], pool[pool_at.z : pool_at.z + C, :], barrier=full[4])
        T.tma_copy(given.do[b, t0 : t0 + C, h, :], pool[pool_at.do : pool_at.do + C, :], barrier=full[4])
        T.mbarrier_arrive(full[4])

    @T.macro
    def reader(block, given, written):
        tx, b, h, nc, base, skip = block.tx, block.b, block.h, block.nc, block.base, block.skip
        full, hand, sc_s, w_s = block.full, block.hand, block.sc_s, block.w_s
        w, g8, quad, q2, rank, row, side = place(tx, R)
        lane_at, time_at = lane_bytes(row, side), lane_bytes(row // R, side)
        c0 = (w * 16 + g8) // R
        ql, gl, mix = T.alloc_local((N // 2,), BF16), T.alloc_local((32,), BF16), T.alloc_local((32,), BF16)
        gw = T.alloc_local((32,), BF16)
        zl = T.alloc_local((8,), BF16)
        cos, sin = T.alloc_local((A // 2,), F16), T.alloc_local((A // 2,), F16)
        score, y = T.alloc_local((32,), F32), T.alloc_local((32,), F32)
        dn = T.alloc_local((N // 2,), F32)
        turn = T.alloc_local((A // 2,), F32)
        own_s, own_d = T.alloc_local((4,), F32), T.alloc_local((4,), F32)
        sums = T.alloc_local((6,), F32)
        read = T.alloc_local((2,), F32)
        mine = T.alloc_local((2,), F32)
        zeta_acc, phi_acc = T.alloc_local((16,), F32), T.alloc_local((16,), F32)
        total = T.alloc_local((1,), F32)
        own = GateRegisters(
            tab_s=block.tab_s, y=y, read=read, zl=zl, gl=gl, gw=gw, sums=sums, zeta_acc=zeta_acc, phi_acc=phi_acc
        )
        if tx < 32:
            load_state(block, given.states, 0)
            load_gate(block, given, 0)
            if nc > 1:
                load_state(block, given.states, 1)
        for e in T.unroll(2):
            mine[e] = T.if_then_else((q2 + e) // R == g8 // R, 1.0, 0.0)
        for i in T.unroll(16):
            zeta_acc[i] = 0.0
            phi_acc[i] = 0.0
        total[0] = 0.0
        for n in T.serial(nc):
            slot = n % 2
            third = n % 3
            t0 = (nc - 1 - n) * C
            q_at = base + pool_at.q * 128 + slot * (NB * TILE)
            k_at = base + pool_at.k * 128 + slot * (NB * TILE)
            h_at = base + pool_at.h * 128 + slot * (NB * TILE)
            x_at = base + pool_at.x * 128 + slot * TILE
            T.mbarrier_wait_parity(full[slot], n // 2 % 2)
            angles(cos, sin, block.cs_s, third, c0, q2)
            load_tile(q_at, lane_at, ql, all_k)
            biased(ql, block.bias_s, 0, rank, quad)
            rotated(ql, cos, sin)
            store_tile(q_at, lane_at, ql, all_k)
            T.fence_proxy_async()
            arrive(hand, Q_READY + slot, tx)
            if tx < 32:
                T.tma_store_wait(0)
                if (n > 0) & (n + 1 < nc):
                    load_state(block, given.states, n + 1)
            for rh in T.unroll(2):
                read[rh] = scalar.read_scale(sc_s[third, 0, c0 + rh * parts])
            T.mbarrier_wait_parity(hand[K_READY + slot], n // 2 % 2)
            # y again, for the gradients of the gate
            begin_batch(ql, score)
            product_rs(score, 0, ql, k_at, 4 * NB, True, True)
            T.warpgroup_commit_batch()
            end_batch(0, score)
            T.call_extern("handle", "walk::same_time", T.access_ptr(score[0], "r"), w, T.access_ptr(own_s[0], "w"))
            weighted(mix, score, w_s, slot, c0, q2, w, skip, True)
            T.mbarrier_wait_parity(full[2 + slot], n // 2 % 2)
            begin_batch(ql, y)
            product_rs(y, 0, ql, h_at, 4 * NB, False, True)
            T.warpgroup_commit_batch()
            end_batch(0, y)
            for i in T.unroll(32):
                y[i] = y[i] * read[i // 2 % 2]
            begin_batch(mix, y)
            product_rs(y, 0, mix, x_at, 4, False, False)
            T.warpgroup_commit_batch()
            T.mbarrier_wait_parity(full[4], n % 2)
            if n > 0:
                T.mbarrier_wait_parity(hand[G_FREE], (n - 1) % 2)
            end_batch(0, y)
            gate(
                block, own, written.dz, t0=t0, c0=c0, rank=rank, quad=quad, q2=q2, lane_at=lane_at, time_at=time_at
            )  # fmt: skip
            T.fence_proxy_async()
            arrive(hand, G_READY, tx)
            begin_batch(gl, score)
            product_rs(score, 0, gl, x_at, 4, True, True)
            T.warpgroup_commit_batch()
            end_batch(0, score)
            T.call_extern("handle", "walk::same_time", T.access_ptr(score[0], "r"), w, T.access_ptr(own_d[0], "w"))
            weighted(mix, score, w_s, slot, c0, q2, w, skip, False)
            load_tile(base + pool_at.gw * 128, lane_at, gw, half)
            # q
            begin_batch(mix, gw, dn)
            for p in tuple(range(NB)):
                product_rs(dn, 32 * p, gw, h_at + p * TILE, 4, True, True)
                product_rs(dn, 32 * p, mix, k_at + p * TILE, 4, False, False)
            T.warpgroup_commit_batch()
            for rh in T.unroll(2):
                sums[rh * 3 + 1] = 0.0
                sums[rh * 3 + 2] = 0.0
                for e in T.unroll(2):
                    there = own_d[rh * 2 + e] * mine[e]
                    sums[rh * 3 + 1] += own_s[rh * 2 + e] * there
                    mixed = own_s[rh * 2 + e] * sc_s[third, 2, c0 + rh * parts] + skip[e]
                    sums[rh * 3 + 2] += f32(bf16(mixed)) * there
                    total[0] += T.if_then_else(q2 + e == g8, own_d[rh * 2 + e], 0.0)
            T.call_extern("handle", f"walk::time_sum<{R}, 3>", T.access_ptr(sums[0], "rw"))
            if (quad < 2) & (rank == 0):
                written.row_q[b, h, t0 + c0 + quad * parts] = sums[0]
                written.same[b, h, t0 + c0 + quad * parts] = sums[1]
                written.diag[b, h, t0 + c0 + quad * parts] = sums[2]
            load_tile(q_at, lane_at, ql, some_k)
            angles(cos, sin, block.cs_s, third, c0, q2)
            end_batch(0, dn)
            unrotated(ql, dn, ql, turn, cos, sin)
            T.call_extern("handle", f"walk::rank_sum<{R}, {A // 2}>", T.access_ptr(turn[0], "rw"))
            for i in T.unroll(A // 2 // R):
                at = first_of(A // 2, R, tx) + i
                block.turn_s[slot, c0 + at // 2 % 2 * parts, at // 4 * 8 + q2 + at % 2] = turn[i]
            arrive(hand, K_FREE + slot, tx)
            T.sync_threads(1, GROUP)
            store_tile(h_at, lane_at, ql, all_k)
            T.fence_proxy_async()
            T.sync_threads(1, GROUP)
            if tx < 32:
                for p in T.unroll(NB):
                    T.tma_copy(
                        block.pool[pool_at.h + (slot * NB + p) * 64 : pool_at.h + (slot * NB + p) * 64 + 64, :],
                        written.dqh[b, t0 * R : t0 * R + 64, h, p * 64 : p * 64 + 64],
                    )
                if n + 1 < nc:
                    load_gate(block, given, n + 1)
        flushed(zeta_acc, w_s, written.p_zeta, b, h, w, g8, quad, 1)
        flushed(phi_acc, w_s, written.p_phi, b, h, w, g8, quad, 1)
        for lanes in (1, 2, 4, 8, 16):
            total[0] += T.shfl_xor(total[0], lanes)
        T.sync_threads(1, GROUP)
        if tx % 32 == 0:
            w_s[w] = total[0]
        T.sync_threads(1, GROUP)
        if tx == 0:
            written.p_d[b, h] = w_s[0] + w_s[1] + w_s[2] + w_s[3]
        T.tma_store_wait(0)

    return reader
