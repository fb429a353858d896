"""B3 in one role with what products make kept in registers: y, x, g, E and their gradients stand on their side.

y^T, x^T, g^T, E^T are [P,M] or [P,N]: a thread holds two columns p and, of all ranks, the same tokens. So the sums over
ranks are sums in a thread, running sums are 2 R instead of M P / 256 numbers, and x^T, g^T, E^T are left operands of
the next product as they are. dq~ and dk~ are [M,N]: a thread holds the pairs that one angle turns. Columns and rows
are i = r * C + c. See matrices.py for who holds what; letters: see shape.py.
"""

# TileLang programs: `T` is the language's own name, macros take tensors without annotations, bodies are long.
# ruff: noqa: C901, N812, PLR0913, PLR0917

from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from kernels.mamba3_mimo.cuda.host.machine import LINE
from kernels.mamba3_mimo.cuda.host.shape import ScanShape
from kernels.mamba3_mimo.cuda.host.variant import Variant
from kernels.mamba3_mimo.cuda.pieces import scalar
from kernels.mamba3_mimo.cuda.pieces.matrices import kept, row, scatter_sums, take_turned
from kernels.mamba3_mimo.cuda.pieces.places import EDGE
from kernels.mamba3_mimo.cuda.pieces.products import begin_batch
from kernels.mamba3_mimo.cuda.pieces.scalar import RotaryPair
from kernels.mamba3_mimo.cuda.pieces.tiles import BF16, F32, bf16, f32


def lifts(s: ScanShape, v: Variant) -> bool:
    """Return whether B3 takes this form: one warp group, tiles of 64 x 64, no switch that wants x loaded or merged."""
    square = (s.M, s.N, s.P) == (64, 64, 64) and s.C <= 32
    return square and not (v.warp_specialize or v.psiv_cache or v.aggressive_smem_merge)


def make_product(s: ScanShape) -> tuple[Any, Any]:
    """Return macros of a product of tiles 64 x 64 x 64 into c fp32 [32], each a batch of its own.

    registers(c, a, b, clear, depth_last): a bf16 [32] in registers. shared(c, a, b, clear, a_depth, b_depth): both
    descriptors. `depth_last`: the summed axis is the tile's columns. The caller fences what is touched, and waits.
    """

    def at(step: Any, depth_last: bool) -> Any:
        return (step * 32 if depth_last else step * 16 * LINE) >> 4

    @T.macro
    def cleared(c):
        for i in T.unroll(32):  # else what was in c last would be kept for it
            c[i] = 0.0

    @T.macro
    def registers(c, a, b, offset, clear, depth_last):
        if clear:
            cleared(c)
        begin_batch(a, c)
        for step in T.unroll(4):
            T.ptx_wgmma_rs(
                F32, "m64n64k16", depth_last, "bf16", "bf16", "fp32", a.data, step * 8, b.data,
                at(step, depth_last) + offset, c.data, 0, T.Select(step > 0, 1, 0) if clear else 1, 1, 1,
            )  # fmt: skip
        T.warpgroup_commit_batch()

    @T.macro
    def shared(c, a, a_offset, b, b_offset, clear, a_depth, b_depth):
        if clear:
            cleared(c)
        begin_batch(c)
        for step in T.unroll(4):
            T.ptx_wgmma_ss(
                F32, "m64n64k16", a_depth, b_depth, "bf16", "bf16", "fp32", a.data, at(step, a_depth) + a_offset,
                b.data, at(step, b_depth) + b_offset, c.data, 0, T.Select(step > 0, 1, 0) if clear else 1, 1, 1,
            )  # fmt: skip
        T.warpgroup_commit_batch()

    return registers, shared


def make_scales(s: ScanShape) -> SimpleNamespace:
    """Return macros over scalar_s [3 * slots,C], lc, sk, gm of a chunk from row `at` on.

    pairs(w, ...): the thread's weights of the write of time u in the output of time t, [2 * C / 4]; reads(scale, ...),
    writes(scale, ...): of its columns [C / 4]; `read_of`, `write_of`: of its row.
    """
    C, parts = s.C, s.C // 8

    @T.macro
    def pairs(w, scalar_s, at, tx):
        for lower in (0, 1):
            t = row(tx, lower) % C
            for part in T.unroll(parts):
                for e in T.unroll(2):
                    u = part * 8 + tx % 4 * 2 + e
                    w[(lower * parts + part) * 2 + e] = scalar.pair_weight(
                        t, u, scalar_s[at, t], scalar_s[at, u], scalar_s[at + 1, u], scalar_s[at + 2, t]
                    )

    @T.macro
    def reads(scale, scalar_s, at, tx):
        for part in T.unroll(parts):
            for e in T.unroll(2):
                scale[part * 2 + e] = scalar.read_scale(scalar_s[at, part * 8 + tx % 4 * 2 + e])

    @T.macro
    def writes(scale, scalar_s, at, tx):
        for part in T.unroll(parts):
            for e in T.unroll(2):
                u = part * 8 + tx % 4 * 2 + e
                scale[part * 2 + e] = scalar.write_scale(scalar_s[at, C - 1], scalar_s[at, u], scalar_s[at + 1, u])

    def read_of(scalar_s: Any, at: Any, tx: Any, lower: Any) -> Any:
        return scalar.read_scale(scalar_s[at, row(tx, lower) % C])

    def write_of(scalar_s: Any, at: Any, tx: Any, lower: Any) -> Any:
        t = row(tx, lower) % C
        return scalar.write_scale(scalar_s[at, C - 1], scalar_s[at, t], scalar_s[at + 1, t])

    return SimpleNamespace(pairs=pairs, reads=reads, writes=writes, read_of=read_of, write_of=write_of)


def make_scores(s: ScanShape) -> SimpleNamespace:
    """Return macros over scores [M,M] in registers.

    weighted(out, score, w, skip, tx) in bf16, D on the diagonal; weighed(out, score, w) without D; own(out, score, tx):
    in the lane that `owns`, the scores [2 R] of a row's token with itself, rank by rank.
    """
    C, R, M, parts = s.C, s.R, s.M, s.C // 8

    @T.macro
    def weighted(out, score, w, skip, tx):
        for lower in (0, 1):
            mine = row(tx, lower) - tx % 4 * 2
            for block in tuple(range(M // 8)):
                for e in T.vectorized(2):
                    out[block * 4 + lower * 2 + e] = bf16(
                        scalar.weighted(
                            score[block * 4 + lower * 2 + e], w[(lower * parts + block % parts) * 2 + e],
                            (mine == block * 8 + e) if block % 2 == lower else False, skip,
                        )
                    )  # fmt: skip

    @T.macro
    def weighed(out, score, w):
        for lower in (0, 1):
            for block in tuple(range(M // 8)):
                for e in T.vectorized(2):
                    out[block * 4 + lower * 2 + e] = bf16(
                        score[block * 4 + lower * 2 + e] * w[(lower * parts + block % parts) * 2 + e]
                    )

    @T.macro
    def own(out, score, tx):
        odd = tx // 4 % 2 > 0
        for lower in (0, 1):
            for r in tuple(range(R)):
                for part in tuple(range(parts)):
                    if parts > 2 or part == lower % parts:
                        i = (r * parts + part) * 4 + lower * 2
                        met = T.if_then_else(odd, score[i + 1], score[i])
                        if parts > 2:
                            out[lower * R + r] = T.if_then_else(
                                (tx // 32 * 2 + lower) % parts == part, met, 0.0 if part == 0 else out[lower * R + r]
                            )
                        else:
                            out[lower * R + r] = met

    return SimpleNamespace(weighted=weighted, weighed=weighed, own=own)


def owns(tx: Any) -> Any:
    """Return whether the lane holds the scores of its rows' tokens with themselves."""
    return tx % 4 == tx % 32 // 8


def make_gate(s: ScanShape) -> tuple[Any, Any, Any]:
    """Return the macros spread(x, v, psi_s, tx), gate(...) and values(...) over [P,M] in registers.

    Weights lie as [P,R] fp32 in shared memory, sums over the walk as [2 R], sums over ranks as [C / 2].
    """
    C, R, parts = s.C, s.R, s.C // 8
    wide = min(R, 4)

    @T.macro
    def weights(out, tile, tx, lower):
        for some in T.unroll(R // wide):
            for r in T.vectorized(wide):
                out[some * wide + r] = tile[row(tx, lower), some * wide + r]

    @T.macro
    def spread(x, v, psi_s, tx):
        psi, v2 = T.alloc_local((R,), F32), T.alloc_local((2,), F32)
        for lower in (0, 1):
            weights(psi, psi_s, tx, lower)
            for part in T.unroll(parts):
                for e in T.vectorized(2):
                    v2[e] = f32(v[(part * 2 + lower) * 2 + e])
                for r in T.unroll(R):
                    for e in T.vectorized(2):
                        x[(r * parts + part) * 4 + lower * 2 + e] = bf16(scalar.psiv(v2[e], psi[r]))

    @T.macro
    def gate(y, g, gw, dz, rows, z, do, scale, given, sums, tx):
        half_zeta, zeta, phi = (T.alloc_local((R,), F32) for _ in range(3))
        z2, d2, g2 = (T.alloc_local((2,), F32) for _ in range(3))
        half_u, bent, silu, du = (T.alloc_local((1,), F32) for _ in range(4))
        for c in T.unroll(C // 4):
            rows[c] = 0.0
        for c in T.unroll(C // 2):
            dz[c] = 0.0
        for lower in (0, 1):
            if s.gated:
                weights(half_zeta, given.half_zeta_s, tx, lower)
                weights(zeta, given.zeta_s, tx, lower)
            if s.reduced:
                weights(phi, given.phi_s, tx, lower)
            for part in T.unroll(parts):
                at = (part * 2 + lower) * 2
                if s.gated:
                    for e in T.vectorized(2):
                        z2[e] = f32(z[at + e])
                if s.reduced:
                    for e in T.vectorized(2):
                        d2[e] = f32(do[at + e])
                for r in T.unroll(R):
                    i = (r * parts + part) * 4 + lower * 2
                    if not s.reduced:
                        for e in T.vectorized(2):
                            d2[e] = f32(do[i + e])
                    for e in T.unroll(2):
                        if s.gated:
                            half_u[0] = z2[e] * half_zeta[r]
                            bent[0] = scalar.bent(half_u[0])
                            silu[0] = scalar.silu(half_u[0], bent[0])
                            du[0] = d2[e] * y[i + e] * scalar.silu_slope(silu[0], bent[0])
                            sums.zeta_acc[r * 2 + lower] += du[0] * z2[e]
                            dz[at + e] += du[0] * zeta[r]
                        g2[e] = d2[e] * silu[0] if s.gated else d2[e]
                        if s.reduced:
                            sums.phi_acc[r * 2 + lower] += g2[e] * y[i + e]
                            g2[e] = g2[e] * phi[r]
                    for e in T.vectorized(2):
                        g[i + e] = bf16(g2[e])
                    for e in T.vectorized(2):
                        gw[i + e] = bf16(g2[e] * scale[part * 2 + e])
                    # of g as the products take it: else the same step's share would not cancel in the gradients of time
                    for e in T.vectorized(2):
                        g2[e] = f32(g[i + e])
                    for e in T.unroll(2):
                        rows[part * 2 + e] += g2[e] * y[i + e]

    @T.macro
    def values(dx, dv, rows, v, psi_s, sums, tx):
        psi, v2 = T.alloc_local((R,), F32), T.alloc_local((2,), F32)
        x2, xb = T.alloc_local((2,), F32), T.alloc_local((2,), BF16)
        for c in T.unroll(C // 4):
            rows[C // 4 + c] = 0.0
        for c in T.unroll(C // 2):
            dv[c] = 0.0
        for lower in (0, 1):
            weights(psi, psi_s, tx, lower)
            for part in T.unroll(parts):
                at = (part * 2 + lower) * 2
                for e in T.vectorized(2):
                    v2[e] = f32(v[at + e])
                for r in T.unroll(R):
                    i = (r * parts + part) * 4 + lower * 2
                    for e in T.vectorized(2):
                        xb[e] = bf16(scalar.psiv(v2[e], psi[r]))
                    for e in T.vectorized(2):
                        x2[e] = f32(xb[e])
                    for e in T.unroll(2):
                        sums.psi_acc[r * 2 + lower] += dx[i + e] * v2[e]
                        dv[at + e] += scalar.psiv(dx[i + e], psi[r])
                        rows[C // 4 + part * 2 + e] += dx[i + e] * x2[e]

    return spread, gate, values


def make_turned_back(s: ScanShape) -> Any:
    """Return macro(grad [32], tile_s [M,N], turn [A / 2], cs_s, first, tx): undo the rotation, in registers.

    grad is the gradient of the rotated tile_s; adds the gradient of the thread's angles to `turn`.
    """
    A, C, half = s.A, s.C, s.N // 2

    @T.macro
    def turned_back(grad, tile_s, turn, cs_s, first, tx):
        cos, sin, lo, hi = (T.alloc_local((2,), F32) for _ in range(4))
        near, far = T.alloc_local((2,), F32), T.alloc_local((2,), F32)
        for lower in (0, 1):
            for block in T.unroll(A // 8):
                for e in T.vectorized(2):
                    cos[e] = f32(cs_s[first + block * 2, row(tx, lower) % C, tx % 4 * 2 + e])
                for e in T.vectorized(2):
                    sin[e] = f32(cs_s[first + block * 2 + 1, row(tx, lower) % C, tx % 4 * 2 + e])
                for e in T.vectorized(2):
                    lo[e] = f32(tile_s[row(tx, lower), block * 8 + tx % 4 * 2 + e])
                for e in T.vectorized(2):
                    hi[e] = f32(tile_s[row(tx, lower), half + block * 8 + tx % 4 * 2 + e])
                for e in T.unroll(2):
                    i = block * 4 + lower * 2 + e
                    j = i + half // 2
                    turn[(lower * (A // 8) + block) * 2 + e] += scalar.moment(
                        RotaryPair(grad[i], grad[j]), RotaryPair(lo[e], hi[e])
                    )
                    near[e] = scalar.turned_back(grad[i], grad[j], cos[e], sin[e]).lo
                    far[e] = scalar.turned_back(grad[i], grad[j], cos[e], sin[e]).hi
                    grad[i] = near[e]
                    grad[j] = far[e]

    return turned_back


def make_edge(s: ScanShape) -> tuple[Any, Any]:
    """Return `edges.make_edge`'s macros for E^T in registers: summed(E, h_s, first, line_s, t0, tx), written(...)."""
    N = s.N

    @T.macro
    def summed(E, h_s, first, line_s, t0, tx):
        if (t0 & (EDGE - 1)) == 0:
            sums = T.alloc_local((N // 2,), F32)
            near, far = T.alloc_local((4,), BF16), T.alloc_local((4,), BF16)
            for block in T.unroll(N // 16):
                take_turned(near, h_s, first + block * 8, 8, tx)
                take_turned(far, h_s, first + N // 2 + block * 8, 8, tx)
                for e in T.unroll(2):
                    i = block * 4 + e
                    j = i + N // 4
                    sums[block * 2 + e] = E[i] * f32(near[e]) + E[i + 2] * f32(near[2 + e])
                    sums[N // 8 + block * 2 + e] = E[j] * f32(far[e]) + E[j + 2] * f32(far[2 + e])
                    sums[N // 4 + block * 2 + e] = E[i] * f32(far[e]) + E[i + 2] * f32(far[2 + e])
                    sums[N // 8 * 3 + block * 2 + e] = E[j] * f32(near[e]) + E[j + 2] * f32(near[2 + e])
            scatter_sums(sums, N // 2, tx)
            for c in T.unroll(N // 16):
                at = kept(N // 2, tx) + c
                line_s[tx // 32, at // (N // 4), at % (N // 4) // 2 * 8 + tx % 4 * 2 + at % 2] = sums[c]

    @T.macro
    def written(line_s, edges, b, h, t0, tx):
        # shifted, not divided: TileLang 0.1.15 divides a falling index one too low where a chunk has 8 tokens
        if (t0 & (EDGE - 1)) == 0:
            for far, n in T.Parallel(2, N):
                edges[b, h, t0 >> EDGE.bit_length() - 1, far, n] = (
                    line_s[0, far, n] + line_s[1, far, n] + line_s[2, far, n] + line_s[3, far, n]
                )

    return summed, written
