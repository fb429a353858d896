"""What B3 in the lifted form (lifted.py) loads and writes, but for its large tiles. Letters: see shape.py."""

# TileLang programs: `T` is the language's own name, macros take tensors without annotations.
# ruff: noqa: C901, N812

from functools import reduce
from operator import add
from typing import Any

import tilelang.language as T

from kernels.mamba3_mimo.cuda.backward.groups import Given, Written
from kernels.mamba3_mimo.cuda.backward.lifted_places import WalkRegisters, WalkTiles, split_of
from kernels.mamba3_mimo.cuda.host.shape import ScanShape
from kernels.mamba3_mimo.cuda.host.variant import Variant
from kernels.mamba3_mimo.cuda.pieces.loads import Loads
from kernels.mamba3_mimo.cuda.pieces.matrices import column, kept, row, scatter_sums
from kernels.mamba3_mimo.cuda.pieces.tiles import rank_sum, row_sum


def make_start(s: ScanShape, v: Variant, loads: Loads, given: Given, at: WalkTiles) -> Any:
    """Return macro(b, h, t0, n, tx): start every copy of chunk n, which begins at token t0; four warps share them."""
    C, N, P, depth = s.C, s.N, s.P, s.A // 4

    @T.macro
    def outputs(b, h, t0, n):
        one = loads.slot(n)
        loads.copy(given.states[b, h, t0 // C, :, :], at.h_s[one * N : (one + 1) * N, :], at.bar, n)
        if s.gated:
            loads.copy(given.z[b, t0 : t0 + C, h, :], at.z_s[one * C : (one + 1) * C, :], at.bar, n)
        if s.reduced:
            loads.copy(given.do[b, t0 : t0 + C, h, :], at.do_s[one * C : (one + 1) * C, :], at.bar, n)
        else:
            loads.ranks_in(at.do_s, given.do, [slice(0, P)], at.bar, b, h, t0, n)

    @T.macro
    def inputs(b, h, t0, n):
        held = loads.held_slot(n)
        loads.copy(given.v[b, t0 : t0 + C, h, :], at.v_s[held * C : (held + 1) * C, :], at.bar, n)
        loads.copy(given.cs[b, h, t0 // C, :, :, :], at.cs_s[held * depth : (held + 1) * depth, :, :], at.bar, n)
        loads.copy(given.lc[b, h, t0 : t0 + C], at.scalar_s[held * 3, :], at.bar, n)
        loads.copy(given.sk[b, h, t0 : t0 + C], at.scalar_s[held * 3 + 1, :], at.bar, n)
        loads.copy(given.gm[b, h, t0 : t0 + C], at.scalar_s[held * 3 + 2, :], at.bar, n)

    @T.macro
    def start(b, h, t0, n, tx):
        if v.tma:
            # the compiler elects a thread of every range of threads that it can tell apart
            if tx < 64:
                if tx < 32:
                    loads.rows(at.q_raw, given.q, at.bar, b, h, t0, n)
                else:
                    loads.rows(at.k_raw, given.k, at.bar, b, h, t0, n)
            else:
                if tx < 96:
                    outputs(b, h, t0, n)
                else:
                    inputs(b, h, t0, n)
        else:
            loads.rows(at.q_raw, given.q, at.bar, b, h, t0, n)
            loads.rows(at.k_raw, given.k, at.bar, b, h, t0, n)
            outputs(b, h, t0, n)
            inputs(b, h, t0, n)
        loads.posted(at.bar, n)

    return start


def copies_of(s: ScanShape, loads: Loads) -> int:
    """Return how many copies load one chunk."""
    return 2 * len(loads.columns()) + 7 + s.gated


def make_rows_out(s: ScanShape, at: WalkTiles, mine: WalkRegisters, written: Written) -> tuple[Any, Any]:
    """Return macros (gather(tx): sums over a chunk's columns into sum_s; out(b, h, t0): all per-token numbers)."""
    C, R, (groups, _, parts, _) = s.C, s.R, split_of(s)

    def line(kind: int, c: Any) -> Any:
        return reduce(add, (at.sum_s[warp, kind, c] for warp in range(4)))

    @T.macro
    def gather(tx):
        scatter_sums(mine.rows, parts * 4, tx)
        for c in T.unroll(max(1, parts // 2)):
            which = kept(parts * 4, tx) + c
            kind, here = which // (parts * 2), which % (parts * 2)
            at.sum_s[tx % 128 // 32, kind, column(tx, here // 2, groups) + here % 2] = mine.rows[c]

    @T.macro
    def out(b, h, t0):
        for c in T.Parallel(C):
            written.same[b, h, t0 + c] = row_sum(at.row_s, 0, c, R, C)
            written.diag[b, h, t0 + c] = row_sum(at.row_s, 1, c, R, C)
            written.row_q[b, h, t0 + c] = line(0, c)
            written.row_k[b, h, t0 + c] = line(1, c)

    return gather, out


def make_turns_out(s: ScanShape, at: WalkTiles, mine: WalkRegisters, written: Written) -> tuple[Any, Any]:
    """Return macros (gather(tx): the gradients of the thread's angles into turn_s; out(b, h, t0): their sums)."""
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


def make_sums_out(s: ScanShape, at: WalkTiles, mine: WalkRegisters, written: Written) -> Any:
    """Return macro(b, h, tx): write the partial sums of the walk."""
    C, R, (groups, _, parts, _) = s.C, s.R, split_of(s)

    there = [(mine.psi, written.p_psi)]
    there += [(mine.zeta, written.p_zeta)] if s.gated else []
    there += [(mine.phi, written.p_phi)] if s.reduced else []

    @T.macro
    def sums_out(b, h, tx):
        for lower in (0, 1):
            for r in T.unroll(R):
                for acc, _ in there:
                    for lanes in (1, 2):
                        acc[r * 2 + lower] += T.shfl_xor(acc[r * 2 + lower], lanes)
                # one partial sum for every 8 rows is wanted: here one lane has all of a rank
                if tx % 4 < parts:
                    line, p = r * (C // 8) + column(tx, tx % 4, groups) // 8, row(tx, lower)
                    for acc, out in there:
                        out[b, h, line, p] = T.if_then_else(tx % 4 == 0, acc[r * 2 + lower], 0.0)
        for lanes in (16, 8, 4, 2, 1):
            mine.d[0] += T.shfl_xor(mine.d[0], lanes)
        if tx % 32 == 0:
            at.total_s[tx // 32] = mine.d[0]
        T.sync_threads()
        if tx == 0:
            written.p_d[b, h] = reduce(add, (at.total_s[warp] for warp in range(4 * groups)))

    return sums_out
