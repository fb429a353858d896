"""Lifted form of B3: results of products stay in registers, with y, x, g, E and their gradients transposed.

y^T, x^T, g^T and E^T are [P,M] or [P,N]. A thread holds two columns p and, for all ranks, the same tokens. So the sums
over ranks are sums within a thread, running sums are 2 R instead of M P / 256 numbers, and x^T, g^T and E^T are left
operands of the next product without a move. dq~ and dk~ are [M,N]: a thread holds the pairs that one angle turns.
Columns and rows are i = r * C + c. See matrices.py for the distribution over threads. Letters: see shape.py.
"""

# TileLang programs: `T` is the language's own name, macros take tensors without annotations, bodies are long.
# ruff: noqa: C901, N812, PLR0912, PLR0915

from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from ablate.kernels.mamba3_mimo.cuda.backward.lifted_layout import Operand, groups_of, split_of
from ablate.kernels.mamba3_mimo.cuda.pieces import scalar
from ablate.kernels.mamba3_mimo.cuda.pieces.matrices import begin_batch, column, kept, row, scatter_sums, take_turned
from ablate.kernels.mamba3_mimo.cuda.pieces.positions import EDGE
from ablate.kernels.mamba3_mimo.cuda.pieces.scalar import RotaryPair
from ablate.kernels.mamba3_mimo.cuda.pieces.tiles import BF16, F32, bf16, f32
from ablate.kernels.mamba3_mimo.cuda.shape import GROUP, ScanShape


@T.macro
def product(c, left, right, width, depth, clear):
    """Begin c [64,width] (+)= left right as a batch of its own, with c fp32 in registers.

    left is an `Operand` or bf16 in registers, right an `Operand`. `depth` is the length of the summed axis.
    """
    if clear:
        for i in T.unroll(width // 2):  # otherwise the compiler would keep the old contents of c
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


def make_scales(s: ScanShape) -> SimpleNamespace:
    """Return macros over scalar_s [3 * slots,C], lc, sk, gm of a chunk from row `at` on.

    pairs(w, ...): the thread's weights of the write of token u in the output of token t. reads(scale, ...) and
    writes(scale, ...): the scales of its columns. by_read(tile, ...) and by_write(...): multiply registers [M,N] by
    the scales of their rows.
    """
    C, (groups, _, parts, _) = s.C, split_of(s)

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

    @T.macro
    def by_rows(tile, scale):
        for lower in (0, 1):
            for block in T.unroll(8):
                for e in T.unroll(2):
                    tile[block * 4 + lower * 2 + e] *= scale[lower]

    @T.macro
    def by_read(tile, scalar_s, at, tx):
        scale = T.alloc_local((2,), F32)
        for lower in (0, 1):
            scale[lower] = scalar.read_scale(scalar_s[at, row(tx, lower) % C])
        by_rows(tile, scale)

    @T.macro
    def by_write(tile, scalar_s, at, tx):
        scale = T.alloc_local((2,), F32)
        for lower in (0, 1):
            t = row(tx, lower) % C
            scale[lower] = scalar.write_scale(scalar_s[at, C - 1], scalar_s[at, t], scalar_s[at + 1, t])
        by_rows(tile, scale)

    return SimpleNamespace(pairs=pairs, reads=reads, writes=writes, by_read=by_read, by_write=by_write)


def make_scores(s: ScanShape) -> SimpleNamespace:
    """Return macros over scores [M,M] in registers.

    weighted(out, score, w, skip, tx): weighted scores in bf16 with D on the diagonal. weighed(out, score, w): without
    D. own(out, score, tx): in the lane that `owns`, the scores [2 R] of a row's token with itself, rank by rank.
    """
    C, R, (groups, blocks, parts, _) = s.C, s.R, split_of(s)

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
                    # index of the row's token among the parts of the group
                    if (tx % GROUP // 32 * 2 + lower) % (C // 8) // groups == part:
                        out[lower * R + r] = met(score, r * parts + part, lower, tx)

    return SimpleNamespace(weighted=weighted, weighed=weighed, own=own)


def owns(tx: Any) -> Any:
    """Return whether the lane holds the scores of its rows' tokens with themselves."""
    return tx % 4 == tx % 32 // 8


def make_same_step(s: ScanShape) -> Any:
    """Return macro(at, mine, first, tx): compute row_s and an addition to D's gradient from `own` and `d_own`.

    row_s: row 0 is the gradient of gamma, row 1 the same token's share of <g, y> and of <x, dx>. Reads scalar_s from
    row `first` on.
    """
    C, R, groups = s.C, s.R, groups_of(s)

    @T.macro
    def same_step(at, mine, first, tx):
        pair, wide = T.alloc_local((2,), BF16), T.alloc_local((2,), F32)
        for lower in tuple(range(2 // groups)):
            line = row(tx, lower if groups == 1 else tx // GROUP)
            mine.ends[0] = 0.0
            mine.ends[1] = 0.0
            weight = at.scalar_s[first + 2, line % C]
            for r in T.unroll(R // 2):
                for e in T.vectorized(2):  # rounded like in the products
                    pair[e] = bf16(
                        scalar.weighted(mine.own[lower * R + r * 2 + e], weight, line // C == r * 2 + e, mine.skip[0])
                    )
                for e in T.vectorized(2):
                    wide[e] = f32(pair[e])
                for e in T.unroll(2):
                    grad = mine.d_own[lower * R + r * 2 + e]
                    mine.ends[0] += mine.own[lower * R + r * 2 + e] * grad
                    mine.ends[1] += grad * wide[e]
                    mine.d[0] += T.if_then_else((line // C == r * 2 + e) & owns(tx), grad, 0.0)
            if owns(tx):
                at.row_s[0, line] = mine.ends[0]
                at.row_s[1, line] = mine.ends[1]

    return same_step


def make_output_gate(s: ScanShape) -> tuple[Any, Any, Any, Any]:
    """Return macros over [P,M] in registers: weights(out, first, tile, tx, lower), spread(x, v, psi), gate, values.

    - gate(mine, at, tx), the output gate: from y the gradient g of y, g times the decay from the chunk's start in gw,
      the gradient of z in `ranks`, <g, y> in `rows`
    - values(mine, at, tx): from dx the gradient of v in `ranks`, and <x, dx> behind <g, y> in `rows`

    Weights are [P,R] fp32 in shared memory. psi of a thread's two rows and sums over the walk are [2 R], sums over
    ranks [C / 2].
    """
    R, (groups, blocks, parts, _) = s.R, split_of(s)
    wide = min(R, 4)

    @T.macro
    def weights(out, first, tile, tx, lower):
        for some in T.unroll(R // wide):
            for r in T.vectorized(wide):
                out[first + some * wide + r] = tile[row(tx, lower), some * wide + r]

    @T.macro
    def spread(x, v, psi):
        v2 = T.alloc_local((2,), F32)
        for lower in (0, 1):
            for part in T.unroll(parts):
                for e in T.vectorized(2):
                    v2[e] = f32(v[(part * 2 + lower) * 2 + e])
                for r in T.unroll(R):
                    for e in T.vectorized(2):
                        x[(r * parts + part) * 4 + lower * 2 + e] = bf16(scalar.psiv(v2[e], psi[lower * R + r]))

    @T.macro
    def gate(mine, at, tx):
        half_zeta, zeta, phi = (T.alloc_local((R,), F32) for _ in range(3))
        z2, d2, g2 = (T.alloc_local((2,), F32) for _ in range(3))
        half_u, bent, du = (T.alloc_local((1,), F32) for _ in range(3))
        for c in T.unroll(parts * 2):
            mine.rows[c] = 0.0
        for c in T.unroll(parts * 4):
            mine.ranks[c] = 0.0
        for lower in (0, 1):
            if s.gated:
                weights(half_zeta, 0, at.half_zeta_s, tx, lower)
                weights(zeta, 0, at.zeta_s, tx, lower)
            if s.reduced:
                weights(phi, 0, at.phi_s, tx, lower)
            for part in T.unroll(parts):
                here = (part * 2 + lower) * 2
                if s.gated:
                    for e in T.vectorized(2):
                        z2[e] = f32(mine.z[here + e])
                if s.reduced:
                    for e in T.vectorized(2):
                        d2[e] = f32(mine.do[here + e])
                for r in T.unroll(R):
                    i = (r * parts + part) * 4 + lower * 2
                    if not s.reduced:
                        for e in T.vectorized(2):
                            d2[e] = f32(mine.do[i + e])
                    for e in T.unroll(2):
                        if s.gated:
                            half_u[0] = z2[e] * half_zeta[r]
                            bent[0] = scalar.bent(half_u[0])
                            g2[e] = scalar.gated_gradient(d2[e], half_u[0], bent[0]).silu
                            du[0] = scalar.gated_gradient(d2[e], half_u[0], bent[0]).double_slope * mine.y[i + e]
                            mine.zeta[r * 2 + lower] += du[0] * z2[e]
                            mine.ranks[here + e] += du[0] * zeta[r]
                        else:
                            g2[e] = d2[e]
                        if s.reduced:
                            mine.phi[r * 2 + lower] += g2[e] * mine.y[i + e]
                            g2[e] = g2[e] * phi[r]
                    for e in T.vectorized(2):
                        mine.g[i + e] = bf16(g2[e])
                    for e in T.vectorized(2):
                        mine.gw[i + e] = bf16(g2[e] * mine.scale[part * 2 + e])
                    # uses the rounded g of the products, so that the same token's share cancels in the time gradients
                    for e in T.vectorized(2):
                        g2[e] = f32(mine.g[i + e])
                    for e in T.unroll(2):
                        mine.rows[part * 2 + e] += g2[e] * mine.y[i + e]

    @T.macro
    def values(mine, at, tx):
        psi, v2, x2 = T.alloc_local((R,), F32), T.alloc_local((2,), F32), T.alloc_local((2,), F32)
        x = T.alloc_local((blocks * 4,), BF16)
        take_turned(x, at.x_s, 0, blocks, groups, tx)  # fewer instructions than computing it again
        for c in T.unroll(parts * 2):
            mine.rows[parts * 2 + c] = 0.0
        for c in T.unroll(parts * 4):
            mine.ranks[c] = 0.0
        for lower in (0, 1):
            weights(psi, 0, at.psi_s, tx, lower)
            for part in T.unroll(parts):
                here = (part * 2 + lower) * 2
                for e in T.vectorized(2):
                    v2[e] = f32(mine.v[here + e])
                for r in T.unroll(R):
                    i = (r * parts + part) * 4 + lower * 2
                    for e in T.vectorized(2):
                        x2[e] = f32(x[i + e])
                    for e in T.unroll(2):
                        mine.psi[r * 2 + lower] += mine.dx[i + e] * v2[e]
                        mine.ranks[here + e] += scalar.psiv(mine.dx[i + e], psi[r])
                        mine.rows[parts * 2 + part * 2 + e] += mine.dx[i + e] * x2[e]

    return weights, spread, gate, values


def make_ranks(s: ScanShape) -> Any:
    """Return macro(tile, tx): write 16 rows that are 1 at another tile's rows of one rank, else 0.

    Row i is for rank i, row 8 + i for rank i - R. Behind q's ranks they are the columns of one product.
    """

    @T.macro
    def ranks(tile, tx):
        if tx < GROUP:
            which, first = tx // 8, tx % 8 * 8  # 8 columns with the same rank
            for e in T.vectorized(8):
                tile[which, first + e] = bf16(T.if_then_else(first // s.C == which % 8 - which // 8 * s.R, 1.0, 0.0))

    return ranks


def make_turned_back(s: ScanShape) -> Any:
    """Return macro(grad [32], tile_s [M,N], turn, cs_s, first, tx): undo the rotation, in registers.

    grad is the gradient of the rotated tile_s, with the columns of `panel_column`. The macro adds the gradient of the
    thread's angles, `split_of(s).angles` blocks, to `turn`.
    """
    C, (groups, _, _, blocks) = s.C, split_of(s)

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
                    # lo is free here
                    lo[e] = scalar.turned_back(grad[i], grad[i + 16], cos[e], sin[e]).lo
                    grad[i + 16] = scalar.turned_back(grad[i], grad[i + 16], cos[e], sin[e]).hi
                    grad[i] = lo[e]

    return turned_back


def make_edge(s: ScanShape) -> tuple[Any, Any]:
    """Return the macros of gradients_chunk.make_edge for E^T in registers: summed(E, h_s, ...), written(...)."""
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
        # a shift, because TileLang 0.1.15 divides a falling index one too low if a chunk has 8 tokens
        if (t0 & (EDGE - 1)) == 0:
            for far, n in T.Parallel(2, N):
                edges[b, h, t0 >> EDGE.bit_length() - 1, far, n] = (
                    line_s[0, far, n] + line_s[1, far, n] + line_s[2, far, n] + line_s[3, far, n]
                )

    return summed, written
