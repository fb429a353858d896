"""Tile builders of several kernels: biased rotated q and k, PsiV, decay weights.

Each builder returns TileLang macros, which expand into the calling kernel. Letters: see shape.py. Rows are
i = r * C + c.
"""

# TileLang programs: tensors are positional and annotated with calls, `T` is the language's own name, bodies are long.
# ruff: noqa: C901, N812, PLR0913, PLR0917

from functools import reduce
from operator import add
from typing import Any, NamedTuple

import tilelang.language as T

from ablate.kernels.mamba3_mimo.cuda.pieces import scalar
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape

BF16, F16, F32 = "bfloat16", "float16", "float32"

UNPACKED = """
#include <cuda_bf16.h>
static __device__ __forceinline__ float2 unpacked(__nv_bfloat162 pair) {
  auto bits = reinterpret_cast<const unsigned &>(pair);
  return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}
#define __bfloat1622float2 unpacked
static __device__ __forceinline__ int word(const void *pair) { return *reinterpret_cast<const int *>(pair); }
"""
"""CUDA source for `T.import_source`: converts two bfloat16 to float32 in two instructions instead of three (unpacked),
or reads them as one word."""


def f32(value: Any) -> Any:
    """Return `value` as float32."""
    return T.Cast(F32, value)


def bf16(value: Any) -> Any:
    """Return `value` rounded to bfloat16."""
    return T.Cast(BF16, value)


def rank_sum(tile_MP: Any, c: Any, p: Any, ranks: int, chunk: int) -> Any:
    """Return the sum over ranks of tile[r * C + c, p]."""
    return reduce(add, (f32(tile_MP[r * chunk + c, p]) for r in range(ranks)))


class Spread(NamedTuple):
    """Distribution of a tile [M,N] over the threads: row tx % M, groups of 8 columns tx // M + u * step for units u.

    A unit is one group of the first half of the columns and its partner in the second half. The lanes of a warp work on
    different rows and so access different banks of a swizzled tile.
    """

    step: int
    """Groups per unit: threads per row."""
    groups: int
    """Groups of 8 columns in half a row."""
    turning: int
    """Number of rotated groups, the first ones."""

    @property
    def units(self) -> int:
        """Units per thread."""
        return -(-self.groups // self.step)

    @property
    def turns(self) -> int:
        """Units with a rotated group in some thread."""
        return -(-self.turning // self.step)

    @property
    def angles(self) -> int:
        """Angles per thread."""
        return 8 * self.turns

    @property
    def held(self) -> int:
        """Columns per thread."""
        return 16 * self.units

    def all_turn(self, u: int) -> bool:
        """Return whether every thread rotates unit u."""
        return (u + 1) * self.step <= self.turning

    def all_stay(self, u: int) -> bool:
        """Return whether every thread has a unit u and no thread rotates it."""
        return u * self.step >= self.turning and (u + 1) * self.step <= self.groups


def spread(s: ScanShape, threads: int) -> Spread:
    """Return the distribution of the [M,N] tiles of `s` over the threads."""
    return Spread(threads // s.M, s.N // 16, s.A // 8)


def make_angles(s: ScanShape, threads: int) -> Any:
    """Return macro(cos, sin [angles], cs_s [slots*A/4,C,8], first, tx): load angles from row `first` on."""
    C, M = s.C, s.M
    step, _, turning = spread(s, threads)
    units = tuple(range(spread(s, threads).turns))

    @T.macro
    def angles(cos, sin, cs_s, first, tx):
        for u in units:
            # a thread without a rotated group in this unit reads another angle and does not use it
            at = first + T.min(tx // M + u * step, turning - 1) * 2
            for e in T.vectorized(8):
                cos[u * 8 + e] = cs_s[at, tx % C, e]
            for e in T.vectorized(8):
                sin[u * 8 + e] = cs_s[at + 1, tx % C, e]

    return angles


def make_bias(s: ScanShape, threads: int) -> Any:
    """Return macro(held [columns], bias [H,R,N] or [1,R,N], h, tx): load the thread's biases into registers."""
    C, M, half = s.C, s.M, s.N // 2
    step, groups, _ = spread(s, threads)
    units = tuple(range(spread(s, threads).units))

    @T.macro
    def hold(held, bias, h, tx):
        for u in units:
            at = T.min(tx // M + u * step, groups - 1) * 8
            for e in T.vectorized(8):
                held[u * 16 + e] = bias[h, tx % M // C, at + e]
            for e in T.vectorized(8):
                held[u * 16 + 8 + e] = bias[h, tx % M // C, half + at + e]

    return hold


class ColumnOrder(NamedTuple):
    """Column order of a rotated row."""

    place: Any
    """Group of 8 columns of the lower half -> its first column."""
    far: int
    """Distance from a group to its rotary partner, in columns."""


PAIRED = ColumnOrder(lambda group: group * 16, 8)
"""Each group is followed by its rotary partner."""


class TileRotation(NamedTuple):
    """Macros that add the bias to a row of q or k and turn it in float32, rounded to bf16."""

    rotated: Any
    """macro(tile_s [M,N], raw_s, held, cos, sin, tx, n): from shared memory. `held` bf16 are the thread's biases."""
    fetch: Any
    """macro(raw, raw_s, tx, n): load the thread's columns into registers [columns]."""
    fetched: Any
    """macro(tile_s, raw, held, cos, sin, tx): `rotated` from the registers of `fetch`."""


def make_rotated(s: ScanShape, threads: int, at: Any, order: ColumnOrder | None = None) -> TileRotation:
    """Return the rotation of tiles. `at(n, row, column)` is the index in raw_s of chunk n.

    The biases come from `make_bias`. Without `order` columns keep their positions.
    """
    M, half = s.M, s.N // 2
    way = spread(s, threads)
    step, groups, turning = way
    units = tuple(range(way.units))
    place, far = order or ColumnOrder(lambda group: group * 8, half)

    def of_tile(raw_s: Any, tx: Any, n: Any) -> Any:
        return lambda u, high, e: raw_s[at(n, tx % M, high * half + (tx // M + u * step) * 8 + e)]

    def of_registers(raw: Any) -> Any:
        return lambda u, high, e: raw[u * 16 + high * 8 + e]

    @T.macro
    def turned(tile_s, raw, held, cos, sin, tx, u):
        lo, hi = T.alloc_local((8,), F32), T.alloc_local((8,), F32)
        for e in T.vectorized(8):
            lo[e] = f32(raw(u, 0, e)) + f32(held[u * 16 + e])
        for e in T.vectorized(8):
            hi[e] = f32(raw(u, 1, e)) + f32(held[u * 16 + 8 + e])
        for e in T.vectorized(8):
            tile_s[tx % M, place(tx // M + u * step) + e] = bf16(
                scalar.turned(lo[e], hi[e], f32(cos[u * 8 + e]), f32(sin[u * 8 + e])).lo
            )
        for e in T.vectorized(8):
            tile_s[tx % M, far + place(tx // M + u * step) + e] = bf16(
                scalar.turned(lo[e], hi[e], f32(cos[u * 8 + e]), f32(sin[u * 8 + e])).hi
            )

    @T.macro
    def stayed(tile_s, raw, held, tx, u):
        for e in T.vectorized(8):
            tile_s[tx % M, place(tx // M + u * step) + e] = raw(u, 0, e) + held[u * 16 + e]
        for e in T.vectorized(8):
            tile_s[tx % M, far + place(tx // M + u * step) + e] = raw(u, 1, e) + held[u * 16 + 8 + e]

    @T.macro
    def every(tile_s, raw, held, cos, sin, tx):
        for u in units:
            if way.all_turn(u):
                turned(tile_s, raw, held, cos, sin, tx, u)
            elif way.all_stay(u):
                stayed(tile_s, raw, held, tx, u)
            else:
                group = tx // M + u * step
                if group < turning:
                    turned(tile_s, raw, held, cos, sin, tx, u)
                if (group >= turning) & (group < groups):
                    stayed(tile_s, raw, held, tx, u)

    @T.macro
    def rotated(tile_s, raw_s, held, cos, sin, tx, n):
        every(tile_s, of_tile(raw_s, tx, n), held, cos, sin, tx)

    @T.macro
    def fetch(raw, raw_s, tx, n):
        for u in units:
            column = T.min(tx // M + u * step, groups - 1) * 8
            for e in T.vectorized(8):
                raw[u * 16 + e] = raw_s[at(n, tx % M, column + e)]
            for e in T.vectorized(8):
                raw[u * 16 + 8 + e] = raw_s[at(n, tx % M, half + column + e)]

    @T.macro
    def fetched(tile_s, raw, held, cos, sin, tx):
        every(tile_s, of_registers(raw), held, cos, sin, tx)

    return TileRotation(rotated, fetch, fetched)


def make_rotated_shared(s: ScanShape, threads: int, at: Any, order: ColumnOrder | None = None) -> Any:
    """Return the `rotated` macro of `make_rotated` that reads the biases from bias_s [1,R,N] at every use."""
    hold, (rotated, _, _) = make_bias(s, threads), make_rotated(s, threads, at, order)

    @T.macro
    def rotated_shared(tile_s, raw_s, bias_s, cos, sin, tx, n):
        held = T.alloc_local((spread(s, threads).held,), BF16)
        hold(held, bias_s, 0, tx)
        rotated(tile_s, raw_s, held, cos, sin, tx, n)

    return rotated_shared


class Pieces(NamedTuple):
    """Distribution of a tile [C,P] over the threads: 4 columns of row u * step + tx // lanes for units u."""

    lanes: int
    """Threads per row."""
    step: int
    """Rows per unit."""
    units: int
    """Rows per thread."""
    guarded: bool
    """Whether some threads have no row."""


def pieces(s: ScanShape, threads: int) -> Pieces:
    """Return the distribution of the [C,P] tiles of `s` over the threads."""
    step = 4 * threads // s.P
    return Pieces(s.P // 4, step, max(1, s.C // step), step > s.C)


def make_row_scales(s: ScanShape, threads: int) -> Any:
    """Return macro(scale [units], table, first, tx): load the numbers of the thread's rows, from table[first] on."""
    lanes, step, units, guarded = pieces(s, threads)

    @T.macro
    def row_scales(scale, table, first, tx):
        row = T.min(tx // lanes, s.C - 1) if guarded else tx // lanes
        for u in T.unroll(units):
            scale[u] = table[first + u * step + row]

    return row_scales


def make_expanded(s: ScanShape, threads: int) -> Any:
    """Return macro(x_s, source, scale, factor, tx, first): x[first + r * C + c, p] = source * scale[c] * factor[r, p].

    `source` is the thread's part of a [C,P] tile, 4 columns of each of its rows. `scale` has one number per row.
    `factor` [4 * R] holds the thread's columns of a [R,P] tensor.
    """
    C, R = s.C, s.R
    lanes, step, units, guarded = pieces(s, threads)

    @T.macro
    def written(x_s, wide, factor, tx, first):
        for r in T.unroll(R):
            for u in T.unroll(units):
                for e in T.vectorized(4):
                    x_s[first + r * C + u * step + tx // lanes, tx % lanes * 4 + e] = bf16(
                        scalar.psiv(wide[u * 4 + e], factor[r * 4 + e])
                    )

    @T.macro
    def expanded(x_s, source, scale, factor, tx, first=0):
        wide = T.alloc_local((units * 4,), F32)
        for u in T.unroll(units):
            for e in T.vectorized(4):
                wide[u * 4 + e] = f32(source[u * 4 + e]) * scale[u]
        if not guarded or tx // lanes < C:
            written(x_s, wide, factor, tx, first)

    return expanded


def make_factor(s: ScanShape) -> Any:
    """Return macro(factor [4 * R], tensor [H,R,P], h, tx): load the thread's columns of psi into registers."""
    R, P = s.R, s.P

    @T.macro
    def factor(out, tensor, h, tx):
        for r in T.unroll(R):
            for e in T.vectorized(4):
                out[r * 4 + e] = tensor[h, r, tx % (P // 4) * 4 + e]

    return factor


def make_piece(s: ScanShape, threads: int) -> Any:
    """Return macro(out [4 * units], tile_s [rows,P], first, tx): load the thread's part of the tile at `first`."""
    lanes, step, units, guarded = pieces(s, threads)

    @T.macro
    def piece(out, tile_s, first, tx):
        row = T.min(tx // lanes, s.C - 1) if guarded else tx // lanes
        for u in T.unroll(units):
            for e in T.vectorized(4):
                out[u * 4 + e] = tile_s[first + u * step + row, tx % lanes * 4 + e]

    return piece


WINDOW = 256
"""Most tokens whose scalars are in shared memory at a time. A sequential walk is too long for all of them."""


def window(s: ScanShape) -> int:
    """Return the number of tokens in the scalar tables of a walk."""
    return min(s.L, WINDOW)


def make_window(s: ScanShape) -> Any:
    """Return macro(lc_s, sk_s, gm_s, read_s, write_s [window], lc, sk, gm, b, h, t0): load scalars from token t0 on.

    read_s is the decay from the chunk's start to the token. write_s is the decay from the token to the chunk's end,
    times the write scale.
    """
    S, C, W = s.S, s.C, window(s)

    @T.macro
    def weight_scales(lc_s, sk_s, gm_s, read_s, write_s, lc, sk, gm, b, h, t0):
        for t in T.Parallel(W):
            at = T.min(t0 + t, S - 1)
            last = T.min(t0 + t // C * C + C - 1, S - 1)
            read_s[t] = scalar.read_scale(lc[b, h, at])
            write_s[t] = scalar.write_scale(lc[b, h, last], lc[b, h, at], sk[b, h, at])
        for t in T.Parallel(W):
            at = T.min(t0 + t, S - 1)
            lc_s[t] = lc[b, h, at]
            sk_s[t] = sk[b, h, at]
            gm_s[t] = gm[b, h, at]

    return weight_scales


def make_weights(s: ScanShape) -> Any:
    """Return macro(w_s [C,C], lc_s, sk_s, gm_s, at): the weights of the write of token u in the output of token t."""
    C = s.C

    @T.macro
    def weights(w_s, lc_s, sk_s, gm_s, at):
        for t, u in T.Parallel(C, C):
            w_s[t, u] = scalar.pair_weight(t, u, lc_s[at + t], lc_s[at + u], sk_s[at + u], gm_s[at + t])

    return weights


def row_sum(rows: Any, which: int, c: Any, ranks: int, chunk: int) -> Any:
    """Return the sum over ranks of rows[which, r * C + c]."""
    return reduce(add, (rows[which, r * chunk + c] for r in range(ranks)))


def pair_sum(left_MR: Any, right_MR: Any, i: Any, ranks: int) -> Any:
    """Return the sum over ranks of left[i, r] * right[i, r]."""
    return reduce(add, (left_MR[i, r] * right_MR[i, r] for r in range(ranks)))


def mixed_sum(mix_MM: Any, right_MR: Any, i: Any, ranks: int, chunk: int) -> Any:
    """Return the sum over ranks r of mix[i, r * C + i % C] * right[i, r], the share of the same token in <g, mix x>."""
    return reduce(add, (f32(mix_MM[i, r * chunk + i % chunk]) * right_MR[i, r] for r in range(ranks)))
