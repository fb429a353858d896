"""B3 in one role with what products make kept in registers: y, x, g, E and their gradients stand on their side.

y^T, x^T, g^T, E^T are [P,M] or [P,N]: a thread holds two columns p and, of all ranks, the same tokens. So the sums over
ranks are sums in a thread, running sums are 2 R instead of M P / 256 numbers, and x^T, g^T, E^T are left operands of
the next product as they are. dq~ and dk~ are [M,N]: a thread holds the pairs that one angle turns. Columns and rows
are i = r * C + c. See matrices.py for who holds what; letters: see shape.py.
"""

# TileLang programs: `T` is the language's own name, macros take tensors without annotations, bodies are long.
# ruff: noqa: C901, N812, PLR0913, PLR0917

from types import SimpleNamespace
from typing import Any, NamedTuple

import tilelang.language as T

from kernels.mamba3_mimo.cuda.host.machine import GROUP, LINE, SHARED_LIMIT
from kernels.mamba3_mimo.cuda.host.shape import ScanShape
from kernels.mamba3_mimo.cuda.host.variant import Variant
from kernels.mamba3_mimo.cuda.pieces import scalar
from kernels.mamba3_mimo.cuda.pieces.matrices import column, kept, row, scatter_sums, take_turned
from kernels.mamba3_mimo.cuda.pieces.places import EDGE
from kernels.mamba3_mimo.cuda.pieces.products import begin_batch
from kernels.mamba3_mimo.cuda.pieces.scalar import RotaryPair
from kernels.mamba3_mimo.cuda.pieces.tiles import BF16, F32, bf16, f32


RESERVED = 2048
"""Bytes that the compiler adds: barriers, alignment, what a block itself takes."""


def groups_of(s: ScanShape) -> int:
    """Return the warp groups of a block: each has 64 states and, of all ranks, every so many blocks of 8 tokens."""
    return s.N // 64


def lifts(s: ScanShape, v: Variant) -> bool:
    """Return whether B3 takes this form: tiles of 64 rows and columns, no switch that wants x loaded or merged.

    And two blocks to a processor at state size 64, of which one alone would wait for itself.
    """
    groups = s.N // 64
    square = s.M == s.P == 64 and s.N in {64, 128} and 8 * groups <= s.C <= 32
    plain = not (v.warp_specialize or v.psiv_cache or v.aggressive_smem_merge)
    return square and plain and groups * shared_bytes(s, v) <= SHARED_LIMIT // 2 * groups**2 - RESERVED


def shared_bytes(s: ScanShape, v: Variant) -> int:
    """Return the bytes of shared memory of a block."""
    C, M, N, P, R, A, two = s.C, s.M, s.N, s.P, s.R, s.A, s.N > 64
    slots, held = max(1, v.pipeline_stages), v.pipeline_stages + 1
    halves = (2 * slots + 2 + 2 * two) * M * N + (slots + 1) * N * P + (4 + 2 * two) * 64 * 64
    halves += C * P * (held + slots) + slots * (C if s.reduced else M) * P + held * A * C * 2 + 2 * R * N
    words = M * (A + 8) + 3 * held * C + 2 * M + 8 * C + 8 * N + 8 + 4 * P * R
    return 2 * halves + 4 * words


class Operand(NamedTuple):
    """A tile in shared memory as an operand: its descriptor, and how the matrix unit walks over it."""

    desc: Any
    """Of the tile, whose blocks of 8 rows follow each other, or every `groups`th of them."""
    deep: bool
    """Whether the axis that is summed over is the columns of the tile."""
    offset: Any = 0
    """Bytes / 16 from the tile's start."""
    rows: int = 64
    """Rows of the tile: how far its next 64 columns are."""
    spread: int = 1
    """If the summed axis is rows: the blocks of 8 follow each other at this distance, and then those in between."""

    def at(self, step: Any) -> Any:
        """Return where the 16 of step `step` of the summed axis begin."""
        if self.deep:
            within = step // 4 * self.rows * LINE + step % 4 * 32
        else:
            within = (step % 4 * 16 * self.spread + step // 4 * 8) * LINE if self.spread > 1 else step * 16 * LINE
        return (within >> 4) + self.offset


def make_product(s: ScanShape) -> Any:
    """Return macro(c, left, right, width, depth, clear): begin c [64,width] (+)= left right, a batch of its own.

    c fp32 in registers, left an `Operand` or bf16 in registers, right an `Operand`; `depth` is what is summed over.
    """

    @T.macro
    def product(c, left, right, width, depth, clear):
        if clear:
            for i in T.unroll(width // 2):  # else what was in c last would be kept for it
                c[i] = 0.0
        if isinstance(left, Operand):
            begin_batch(c)
        else:
            begin_batch(left, c)
        for step in T.unroll(depth // 16):
            if isinstance(left, Operand):
                T.ptx_wgmma_ss(
                    F32, f"m64n{width}k16", left.deep, right.deep, "bf16", "bf16", "fp32", left.desc.data,
                    left.at(step), right.desc.data, right.at(step), c.data, 0,
                    T.Select(step > 0, 1, 0) if clear else 1, 1, 1,
                )  # fmt: skip
            else:
                T.ptx_wgmma_rs(
                    F32, f"m64n{width}k16", right.deep, "bf16", "bf16", "fp32", left.data, step * 8,
                    right.desc.data, right.at(step), c.data, 0, T.Select(step > 0, 1, 0) if clear else 1, 1, 1,
                )  # fmt: skip
        T.warpgroup_commit_batch()

    return product


def make_scales(s: ScanShape) -> SimpleNamespace:
    """Return macros over scalar_s [3 * slots,C], lc, sk, gm of a chunk from row `at` on.

    pairs(w, ...): the thread's weights of the write of time u in the output of time t, [2 * C / 4]; reads(scale, ...),
    writes(scale, ...): of its columns [C / 4]; `read_of`, `write_of`: of its row.
    """
    C, groups = s.C, groups_of(s)
    parts = C // 8 // groups

    @T.macro
    def pairs(w, scalar_s, at, tx):
        for lower in (0, 1):
            t = row(tx, lower) % C
            for part in T.unroll(parts):
                for e in T.unroll(2):
                    u = column(tx, part, groups) + e
                    w[(lower * parts + part) * 2 + e] = scalar.pair_weight(
                        t, u, scalar_s[at, t], scalar_s[at, u], scalar_s[at + 1, u], scalar_s[at + 2, t]
                    )

    @T.macro
    def reads(scale, scalar_s, at, tx):
        for part in T.unroll(parts):
            for e in T.unroll(2):
                scale[part * 2 + e] = scalar.read_scale(scalar_s[at, column(tx, part, groups) + e])

    @T.macro
    def writes(scale, scalar_s, at, tx):
        for part in T.unroll(parts):
            for e in T.unroll(2):
                u = column(tx, part, groups) + e
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
    C, R, M, groups = s.C, s.R, s.M, groups_of(s)
    parts, blocks = C // 8 // groups, M // 8 // groups

    @T.macro
    def weighted(out, score, w, skip, tx):
        for lower in (0, 1):
            mine = row(tx, lower) - column(tx, 0, groups)
            for block in tuple(range(blocks)):
                for e in T.vectorized(2):
                    out[block * 4 + lower * 2 + e] = bf16(
                        scalar.weighted(
                            score[block * 4 + lower * 2 + e], w[(lower * parts + block % parts) * 2 + e],
                            (mine == block * groups * 8 + e) if groups == 2 or block % 2 == lower else False, skip,
                        )
                    )  # fmt: skip

    @T.macro
    def weighed(out, score, w):
        for lower in (0, 1):
            for block in tuple(range(blocks)):
                for e in T.vectorized(2):
                    out[block * 4 + lower * 2 + e] = bf16(
                        score[block * 4 + lower * 2 + e] * w[(lower * parts + block % parts) * 2 + e]
                    )

    def met(score: Any, block: Any, lower: int, tx: Any) -> Any:
        i, odd = block * 4, tx // 4 % 2 > 0
        if groups == 1:
            return T.if_then_else(odd, score[i + lower * 2 + 1], score[i + lower * 2])
        upper, below = (T.if_then_else(odd, score[i + at + 1], score[i + at]) for at in (0, 2))
        return T.if_then_else(tx // GROUP > 0, below, upper)

    @T.macro
    def own(out, score, tx):
        for lower in tuple(range(2 // groups)):
            candidates = tuple(part for part in range(parts) if groups == 2 or parts == 1 or part % 2 == lower)
            for r in tuple(range(R)):
                out[lower * R + r] = met(score, r * parts + candidates[0], lower, tx)
                for part in candidates[1:]:
                    # the part of the row's token, among those of the group
                    if (tx % GROUP // 32 * 2 + lower) % (C // 8) // groups == part:
                        out[lower * R + r] = met(score, r * parts + part, lower, tx)

    return SimpleNamespace(weighted=weighted, weighed=weighed, own=own)


def own_row(s: ScanShape, tx: Any, lower: int) -> Any:
    """Return the row whose token's scores with itself `own` has found, if the lane `owns` them."""
    return row(tx, lower if groups_of(s) == 1 else tx // GROUP)


def owns(tx: Any) -> Any:
    """Return whether the lane holds the scores of its rows' tokens with themselves."""
    return tx % 4 == tx % 32 // 8


def make_gate(s: ScanShape) -> tuple[Any, Any, Any]:
    """Return the macros spread(x, v, psi_s, tx), gate(...) and values(...) over [P,M] in registers.

    Weights lie as [P,R] fp32 in shared memory, sums over the walk as [2 R], sums over ranks as [C / 2].
    """
    R, parts = s.R, s.C // 8 // groups_of(s)
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
        for c in T.unroll(parts * 2):
            rows[c] = 0.0
        for c in T.unroll(parts * 4):
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
        for c in T.unroll(parts * 2):
            rows[parts * 2 + c] = 0.0
        for c in T.unroll(parts * 4):
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
                        rows[parts * 2 + part * 2 + e] += dx[i + e] * x2[e]

    return spread, gate, values


def make_turned_back(s: ScanShape) -> Any:
    """Return macro(grad [32], tile_s [M,N], turn, cs_s, first, tx): undo the rotation, in registers.

    grad is the gradient of the rotated tile_s, whose columns are those of `panel_column`; adds the gradient of the
    thread's angles, of blocks `angle_blocks(s)`, to `turn`.
    """
    C, groups, blocks = s.C, groups_of(s), angle_blocks(s)

    @T.macro
    def turned_back(grad, tile_s, turn, cs_s, first, tx):
        cos, sin, lo, hi = (T.alloc_local((2,), F32) for _ in range(4))
        for lower in (0, 1):
            for block in T.unroll(blocks):
                at, angle = tx // GROUP * 64 + block * 8 + tx % 4 * 2, column(tx, block, groups)
                for e in T.vectorized(2):
                    cos[e] = f32(cs_s[first + angle // 8 * 2, row(tx, lower) % C, tx % 4 * 2 + e])
                for e in T.vectorized(2):
                    sin[e] = f32(cs_s[first + angle // 8 * 2 + 1, row(tx, lower) % C, tx % 4 * 2 + e])
                for e in T.vectorized(2):
                    lo[e] = f32(tile_s[row(tx, lower), at + e])
                for e in T.vectorized(2):
                    hi[e] = f32(tile_s[row(tx, lower), at + 32 + e])
                for e in T.unroll(2):
                    i = block * 4 + lower * 2 + e
                    turn[(lower * blocks + block) * 2 + e] += scalar.moment(
                        RotaryPair(grad[i], grad[i + 16]), RotaryPair(lo[e], hi[e])
                    )
                    # lo is free now
                    lo[e] = scalar.turned_back(grad[i], grad[i + 16], cos[e], sin[e]).lo
                    grad[i + 16] = scalar.turned_back(grad[i], grad[i + 16], cos[e], sin[e]).hi
                    grad[i] = lo[e]

    return turned_back


def angle_blocks(s: ScanShape) -> int:
    """Return how many blocks of 8 angles a thread meets."""
    return s.A // 8 // groups_of(s)


def panel_column(s: ScanShape, group: Any) -> Any:
    """Return where 8 states of the lower half lie in q~ and k~; those that turn with them lie 32 columns behind."""
    groups = groups_of(s)
    return group * 8 if groups == 1 else group % groups * 64 + group // groups * 8


def make_edge(s: ScanShape) -> tuple[Any, Any]:
    """Return `edges.make_edge`'s macros for E^T in registers: summed(E, h_s, first, line_s, t0, tx), written(...)."""
    N, groups = s.N, groups_of(s)

    @T.macro
    def summed(E, h_s, first, line_s, t0, tx):
        if (t0 & (EDGE - 1)) == 0:
            sums = T.alloc_local((32,), F32)
            near, far = T.alloc_local((4,), BF16), T.alloc_local((4,), BF16)
            for block in T.unroll(4):
                take_turned(near, h_s, first + block * groups * 8, 1, groups, tx)
                take_turned(far, h_s, first + N // 2 + block * groups * 8, 1, groups, tx)
                for e in T.unroll(2):
                    i = block * 4 + e
                    sums[block * 2 + e] = E[i] * f32(near[e]) + E[i + 2] * f32(near[2 + e])
                    sums[8 + block * 2 + e] = E[i + 16] * f32(far[e]) + E[i + 18] * f32(far[2 + e])
                    sums[16 + block * 2 + e] = E[i] * f32(far[e]) + E[i + 2] * f32(far[2 + e])
                    sums[24 + block * 2 + e] = E[i + 16] * f32(near[e]) + E[i + 18] * f32(near[2 + e])
            scatter_sums(sums, 32, tx)
            for c in T.unroll(4):
                at = kept(32, tx) + c
                line_s[tx % GROUP // 32, at // 16, column(tx, at % 16 // 2, groups) + at % 2] = sums[c]

    @T.macro
    def written(line_s, edges, b, h, t0, tx):
        # shifted, not divided: TileLang 0.1.15 divides a falling index one too low where a chunk has 8 tokens
        if (t0 & (EDGE - 1)) == 0:
            for far, n in T.Parallel(2, N):
                edges[b, h, t0 >> EDGE.bit_length() - 1, far, n] = (
                    line_s[0, far, n] + line_s[1, far, n] + line_s[2, far, n] + line_s[3, far, n]
                )

    return summed, written
