"""Outputs of B3 in the lifted form (lifted.py) except its large tiles. Letters: see shape.py."""

# TileLang programs: `T` is the language's own name, macros take tensors without annotations.
# ruff: noqa: C901, N812

from functools import reduce
from operator import add
from typing import Any

import tilelang.language as T

from ablate.kernels.mamba3_mimo.cuda.backward.groups import Written
from ablate.kernels.mamba3_mimo.cuda.backward.head_sums import place_of_d
from ablate.kernels.mamba3_mimo.cuda.backward.lifted_layout import WalkRegisters, WalkTiles, ranks_together, split_of
from ablate.kernels.mamba3_mimo.cuda.pieces.matrices import column, end_batch, kept, row, scatter_sums
from ablate.kernels.mamba3_mimo.cuda.pieces.tiles import rank_sum, row_sum
from ablate.kernels.mamba3_mimo.cuda.shape import GROUP, ScanShape


def make_rows_out(s: ScanShape, at: WalkTiles, mine: WalkRegisters, written: Written) -> tuple[Any, Any]:
    """Return macros (gather(tx): sum a chunk's columns into sum_s, out(b, h, t0): write all per-token numbers)."""
    C, R, (groups, _, parts, _) = s.C, s.R, split_of(s)

    def line(kind: int, c: Any) -> Any:
        return reduce(add, (at.sum_s[warp, kind, c] for warp in range(4)))

    @T.macro
    def gather(tx):
        scatter_sums(mine.rows, parts * 4, tx)
        for c in T.unroll(max(1, parts // 2)):
            which = kept(parts * 4, tx) + c
            kind, here = which // (parts * 2), which % (parts * 2)
            at.sum_s[tx % GROUP // 32, kind, column(tx, here // 2, groups) + here % 2] = mine.rows[c]

    @T.macro
    def out(b, h, t0):
        for c in T.Parallel(C):
            written.same[b, h, t0 + c] = row_sum(at.row_s, 0, c, R, C)
            written.diag[b, h, t0 + c] = row_sum(at.row_s, 1, c, R, C)
            written.row_q[b, h, t0 + c] = line(0, c)
            written.row_k[b, h, t0 + c] = line(1, c)

    return gather, out


def make_turns_out(s: ScanShape, at: WalkTiles, mine: WalkRegisters, written: Written) -> tuple[Any, Any]:
    """Return macros (gather(tx): store the thread's angle gradients in turn_s, out(b, h, t0): write their sums)."""
    groups, _, _, angles = split_of(s)

    @T.macro
    def gather(tx):
        for lower in (0, 1):
            for block in T.unroll(angles):
                for e in T.vectorized(2):
                    at.turn_s[row(tx, lower), column(tx, block, groups) + e] = mine.turn[
                        (lower * angles + block) * 2 + e
                    ]

    @T.macro
    def out(b, h, t0):
        for c, j in T.Parallel(s.C, s.A):
            written.dtheta[b, h, t0 + c, j] = rank_sum(at.turn_s, c, j, s.R, s.C)

    return gather, out


def make_sums_out(s: ScanShape, at: WalkTiles, mine: WalkRegisters, written: Written, meet: Any) -> Any:
    """Return macro(b, h, tx): write the partial sums of the walk."""
    C, R, (groups, _, parts, _) = s.C, s.R, split_of(s)

    there = [(mine.psi, written.p_psi, 1.0, None)]
    there += [(mine.zeta, written.p_zeta, 0.5, at.phi_s if s.reduced else None)] if s.gated else []
    there += [(mine.phi, written.p_phi, 1.0, None)] if s.reduced else []

    @T.macro
    def bias_out(sums, first, which, b, h, tx):
        for lower in (0, 1):
            for e in (0, 1):
                rank, state = tx % 4 * 2 + e - first, tx // GROUP * 64 + row(tx, lower)
                if (rank >= 0) & (rank < R):
                    written.p_heads[b, (which * s.H + h) * R + rank, state] = sums[lower * 2 + e]

    @T.macro
    def biases_out(b, h, tx):
        bias_out(mine.q_bias, 0, 0, b, h, tx)
        bias_out(mine.k_bias, R if ranks_together(s) else 0, 1, b, h, tx)

    @T.macro
    def sums_out(b, h, tx):
        for lower in (0, 1):
            for r in T.unroll(R):
                for acc, _, _, _ in there:
                    for lanes in (1, 2):
                        acc[r * 2 + lower] += T.shfl_xor(acc[r * 2 + lower], lanes)
                # the output has one partial sum per 8 rows, but here one lane has all of a rank
                if tx % 4 < parts:
                    line, p = r * (C // 8) + column(tx, tx % 4, groups) // 8, row(tx, lower)
                    for acc, out, whole, factor in there:
                        scale = whole if factor is None else whole * factor[p, r]
                        out[b, h, line, p] = T.if_then_else(tx % 4 == 0, acc[r * 2 + lower] * scale, 0.0)
        for lanes in (16, 8, 4, 2, 1):
            mine.d[0] += T.shfl_xor(mine.d[0], lanes)
        if tx % 32 == 0:
            at.total_s[tx // 32] = mine.d[0]
        meet()
        if tx == 0:
            written.p_heads[b, *place_of_d(s, h)] = reduce(add, (at.total_s[warp] for warp in range(4 * groups)))
        end_batch(0, mine.q_bias, mine.k_bias)
        biases_out(b, h, tx)

    return sums_out
