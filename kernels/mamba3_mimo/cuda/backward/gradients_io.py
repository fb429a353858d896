"""Loads and stores of the backward walk: tiles of a chunk, per-token rows, partial sums. Letters: see shape.py.

Rows are i = r * C + c.
"""

# TileLang programs: tensors are positional and annotated with calls, `T` is the language's own name.
# ruff: noqa: C901, N812, PLR0915

from functools import reduce
from operator import add
from typing import Any, NamedTuple

import tilelang.language as T

from ablate.kernels.mamba3_mimo.cuda.backward.groups import Given, Sums, WalkStaging, Written
from ablate.kernels.mamba3_mimo.cuda.backward.lifted_layout import WalkTiles
from ablate.kernels.mamba3_mimo.cuda.pieces.loads import Loads, panels
from ablate.kernels.mamba3_mimo.cuda.pieces.tiles import row_sum
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant


def part(tile: Any, slot: Any, slots: int, rows: int) -> Any:
    """Return slot `slot` of a tile of `slots` times `rows` rows."""
    return tile[slot * rows : (slot + 1) * rows, :] if slots > 1 else tile


def x_slots(v: Variant, loads: Loads) -> int:
    """Return the slots of x: as many as v has if x is loaded, else one."""
    return loads.held if v.psiv_cache else 1


def threads_of(s: ScanShape) -> int:
    """Return the threads of a block: 256 if a tile has more than 64 x 64 numbers, else 128."""
    return 256 if max(s.N * s.P, s.M * s.N, s.M * s.P, s.M * s.M) > 64 * 64 else 128


def lends(s: ScanShape, v: Variant) -> bool:
    """Return whether q_raw can hold an operand [M,P] after the rotation.

    It must be a whole tile of that form. Two warp groups share its columns and need panels of at most half the width.
    """
    fits = threads_of(s) == 128 or s.P >= 128
    return s.N == s.P and v.layout_2d and v.pipeline_stages <= 1 and fits


def fold_of(s: ScanShape) -> Any:
    """Return the map from a row to its row of partial sums. A thread adds up two rows 8 apart if they have one rank."""
    return (lambda i: i // 16 * 8 + i % 8) if s.C % 16 == 0 else (lambda i: i)


class Columns(NamedTuple):
    """Partial sums over a thread's columns of a product [rows,P]: fragments [rows, groups, width]."""

    groups: int
    """Warp groups that share the columns; each has its own sums."""
    width: int
    """Columns of the partial sums of a group."""
    at: Any
    """Column of the product -> (group, column of its partial sums)."""


def columns_of(s: ScanShape, rows: int) -> Columns:
    """Return the partial sums of a product with `rows` rows. A product that fills no matrix unit has P columns."""
    if rows % 64 > 0:
        return Columns(1, s.P, lambda p: (0, p))
    groups = threads_of(s) // 128
    return Columns(groups, 8, lambda p: (p // (s.P // groups), p % 8))


def operand_panels(s: ScanShape, slots: int) -> list[slice]:
    """Return the columns of each copy into an operand [slots * rows,P] of the matrix unit.

    Two warp groups share its columns. With several slots, a slot is contiguous only within the columns of one group.
    """
    return panels(s.P, min(64, s.P * 128 // threads_of(s)) if slots > 1 else 64)


def make_start(
    s: ScanShape, v: Variant, loads: Loads, given: Given, staged: WalkStaging | WalkTiles, *,
    turns_held: bool = False, copying: int = 0,
) -> Any:  # fmt: skip
    """Return macro(b, h, t0, n, tx): start all copies of chunk n, which starts at token t0.

    Issuing a bulk copy takes a thread about forty instructions, so four warps share the copies. The first warp loads q,
    because its thread has started the store of dq from the same buffer and waited for it. With `turns_held` the angles
    have the slots of tiles that are read until the end of their chunk. `copying` is the first thread that copies.
    """
    C, N, P, M, depth = s.C, s.N, s.P, s.M, s.A // 4

    def turns(n: Any) -> slice:
        slot = loads.held_slot(n) if turns_held else loads.slot(n)
        return slice(slot * depth, (slot + 1) * depth)

    @T.macro
    def states_and_x(b, h, t0, n):
        held = loads.held_slot(n)
        one = loads.slot(n)
        for cols in operand_panels(s, loads.slots):
            loads.copy(given.states[b, h, t0 // C, :, cols], staged.h_s[one * N : (one + 1) * N, cols], staged.bar, n)
        if v.psiv_cache:
            for cols in operand_panels(s, loads.held):
                rows = slice(held * M, (held + 1) * M)
                loads.copy(given.psiv[b, h, t0 // C, :, cols], staged.x_s[rows, cols], staged.bar, n)

    @T.macro
    def outputs(b, h, t0, n):
        one = loads.slot(n)
        for cols in panels(P):
            if s.gated:
                loads.copy(given.z[b, t0 : t0 + C, h, cols], staged.z_s[one * C : (one + 1) * C, cols], staged.bar, n)
            if s.reduced:
                loads.copy(given.do[b, t0 : t0 + C, h, cols], staged.do_s[one * C : (one + 1) * C, cols], staged.bar, n)
            else:
                loads.ranks_in(staged.do_s, given.do, [cols], staged.bar, b, h, t0, n)

    @T.macro
    def inputs(b, h, t0, n):
        held = loads.held_slot(n)
        for cols in panels(P):
            loads.copy(given.v[b, t0 : t0 + C, h, cols], staged.v_s[held * C : (held + 1) * C, cols], staged.bar, n)
        loads.copy(given.cs[b, h, t0 // C, :, :, :], staged.cs_s[turns(n), :, :], staged.bar, n)
        loads.copy(given.lc[b, h, t0 : t0 + C], staged.scalar_s[held * 3, :], staged.bar, n)
        loads.copy(given.sk[b, h, t0 : t0 + C], staged.scalar_s[held * 3 + 1, :], staged.bar, n)
        loads.copy(given.gm[b, h, t0 : t0 + C], staged.scalar_s[held * 3 + 2, :], staged.bar, n)

    @T.macro
    def start(b, h, t0, n, tx):
        if v.tma:
            # the compiler elects one thread of every range of threads that it can distinguish
            if tx < copying + 64:
                if tx < copying + 32:
                    loads.rows(staged.q_raw, given.q, staged.bar, b, h, t0, n)
                else:
                    loads.rows(staged.k_raw, given.k, staged.bar, b, h, t0, n)
            else:
                if tx < copying + 96:
                    states_and_x(b, h, t0, n)
                    outputs(b, h, t0, n)
                else:
                    if tx < copying + 128:
                        inputs(b, h, t0, n)
        else:
            loads.rows(staged.q_raw, given.q, staged.bar, b, h, t0, n)
            loads.rows(staged.k_raw, given.k, staged.bar, b, h, t0, n)
            states_and_x(b, h, t0, n)
            outputs(b, h, t0, n)
            inputs(b, h, t0, n)
        loads.posted(staged.bar, n)

    return start


def copies_of(s: ScanShape, v: Variant, loads: Loads) -> int:
    """Return the number of copies that load one chunk."""
    wide = (2 + s.gated) * len(panels(s.P)) + len(operand_panels(s, loads.slots))
    cached = len(operand_panels(s, loads.held)) if v.psiv_cache else 0
    return 2 * len(loads.columns()) + wide + cached + 4


def make_rows_out(s: ScanShape, sums: Sums, written: Written) -> Any:
    """Return macro(b, h, t0): write the rows of row_s, summed over ranks and column groups."""
    C, R, groups = s.C, s.R, columns_of(s, s.M).groups

    def line(rows, first, c):
        return reduce(add, (row_sum(rows, first + group, c, R, C) for group in range(groups)))

    @T.macro
    def rows_out(b, h, t0):
        for c in T.Parallel(C):
            written.same[b, h, t0 + c] = row_sum(sums.row_s, 0, c, R, C)
            written.diag[b, h, t0 + c] = row_sum(sums.row_s, 1, c, R, C)
            written.row_q[b, h, t0 + c] = line(sums.row_s, 2, c)
            written.row_k[b, h, t0 + c] = line(sums.row_s, 2 + groups, c)

    return rows_out


def make_sums_out(s: ScanShape) -> Any:
    """Return macro(acc, out [B,H,M/8,P], b, h, factor): write the sums over 8 rows of a fragment, in lanes 4 apart.

    The sums are multiplied by `factor` [R,P] if present.
    """
    M, P, C = s.M, s.P, s.C
    rows = fold_of(s)(M - 1) + 1

    @T.macro
    def sums_out(acc, out, b, h, factor=None):
        for lanes in (4, 8, 16):
            for i, p in T.Parallel(rows, P):
                acc[i, p] += T.shfl_xor(acc[i, p], lanes)
        for i, p in T.Parallel(rows, P):
            if i % 8 == 0:
                scale = 1.0 if factor is None else factor[i // 8 * (M // rows) * 8 // C, p]
                out[b, h, i // 8 * (M // rows), p] = acc[i, p] * scale
                if rows < M:
                    out[b, h, i // 8 * 2 + 1, p] = 0.0

    return sums_out
