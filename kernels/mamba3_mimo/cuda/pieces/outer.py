"""Sums over a walk of outer products k~ (x) x: the state update of the kernels that write one state per super-chunk.

There are two forms with the same macros.

Lifted: ldmatrix loads the rows transposed into registers, where they are rotated and then are the left operand of the
matrix unit. They never return to shared memory. A thread holds the states j and N/2 + j of the same tokens, so it
rotates without its neighbours. This permutes the accumulator's rows: 16 * block + i is state 8 * block + i % 8 of the
half i // 8.

Staged: rotated rows in shared memory, for widths without a lifted form.
"""

# TileLang programs: `T` is the language's own name, macros take tensors without annotations.
# ruff: noqa: C901, N812, PLR0915

from dataclasses import dataclass
from typing import Any, NamedTuple

import tilelang.language as T

from ablate.kernels.mamba3_mimo.cuda.pieces import scalar, tiles
from ablate.kernels.mamba3_mimo.cuda.pieces.matrices import begin_batch, end_batch, swizzled_lines
from ablate.kernels.mamba3_mimo.cuda.pieces.tiles import BF16, F16, F32, bf16, f32
from ablate.kernels.mamba3_mimo.cuda.shape import SWIZZLE_128, ScanShape


class Registers(NamedTuple):
    """Private registers of the macros of one kernel."""

    acc: Any
    """The accumulator."""
    left: Any
    """The rotated rows of a chunk."""
    held: Any
    """The thread's biases."""
    desc: Any
    """Descriptor of the right operand for the matrix unit."""


@dataclass(frozen=True)
class Outer:
    """One kernel's outer products; `mine` are its `Registers`."""

    registers: Any
    """() -> the first three `Registers`."""
    slots: int
    """Slots of the right operand, [slots * M, P] bf16. With one slot, all threads must meet before the next write."""
    layouts: Any
    """(right operand) -> its layout annotations."""
    begin: Any
    """macro(mine, bias [H,R,N], h, tx, x_s): clear the accumulator, load the biases, fill desc if used."""
    turn: Any
    """macro(mine, raw_s, cs_s, n, tx): bias and rotate the rows of chunk n; ends the products of `add`."""
    add: Any
    """macro(mine, x_s, n): add chunk n. All threads must have passed a barrier after writing x_s."""
    store: Any
    """macro(mine, out [B,H,N,P], b, h, tx): write the sum."""


def make_outer(s: ScanShape, threads: int, loads: Any) -> Outer:
    """Return the lifted form if `s` allows it, else the staged form."""
    lifted = s.N % (threads // 2) == 0 and s.P % 64 == 0 and s.M % 16 == 0
    return _lifted(s, threads, loads) if lifted else _staged(s, threads, loads)


def _staged(s: ScanShape, threads: int, loads: Any) -> Outer:
    A, M, N, P = s.A, s.M, s.N, s.P
    hold, way = tiles.make_bias(s, threads), tiles.spread(s, threads)
    angles, rotated = tiles.make_angles(s, threads), tiles.make_rotated(s, threads, loads.at).rotated

    @T.macro
    def begin(mine, bias, h, tx, x_s):
        T.clear(mine.acc)
        hold(mine.held, bias, h, tx)

    @T.macro
    def turn(mine, raw_s, cs_s, n, tx):
        cos, sin = T.alloc_local((way.angles,), F16), T.alloc_local((way.angles,), F16)
        angles(cos, sin, cs_s, loads.slot(n) * (A // 4), tx)
        rotated(mine.left, raw_s, mine.held, cos, sin, tx, n)

    @T.macro
    def add(mine, x_s, n):
        T.gemm(mine.left, x_s, mine.acc, transpose_A=True)

    @T.macro
    def store(mine, out, b, h, tx):
        T.copy(mine.acc, out[b, h, :, :])

    return Outer(
        lambda: (T.alloc_fragment((N, P), F32), T.alloc_shared((M, N), BF16), T.alloc_local((way.held,), BF16)),
        1, lambda x_s: {}, begin, turn, add, store,
    )  # fmt: skip


def _lifted(s: ScanShape, threads: int, loads: Any) -> Outer:
    R, A, C, M, N, P, half = s.R, s.A, s.C, s.M, s.N, s.P, s.N // 2
    warps = threads // 32
    blocks, steps, panels, regs = N // 16 // warps, M // 16, P // 64, N * P // threads
    times = max(2, C // 4)  # tokens of a chunk that a thread meets

    @T.macro
    def begin(mine, bias, h, tx, x_s):
        T.initialize_wgmma_descriptor(mine.desc, x_s.access_ptr("r"), SWIZZLE_128, 0, 64)
        for c in T.unroll(regs):
            mine.acc[c] = 0.0
        for j in T.unroll(blocks):
            for r in T.unroll(R):
                mine.held[(j * R + r) * 2] = bias[h, r, (j * warps + tx // 32) * 8 + tx % 32 // 4]
                mine.held[(j * R + r) * 2 + 1] = bias[h, r, half + (j * warps + tx // 32) * 8 + tx % 32 // 4]

    @T.macro
    def rotated(left, held, cs_s, first, j, tx):
        lo, hi = T.alloc_local((2,), F32), T.alloc_local((2,), F32)
        cos, sin = T.alloc_local((times,), F32), T.alloc_local((times,), F32)
        row = first + (j * warps + tx // 32) * 2
        for t in T.unroll(times):
            cos[t] = f32(cs_s[row, t // 2 * 8 + tx % 4 * 2 + t % 2, tx % 32 // 4])
            sin[t] = f32(cs_s[row + 1, t // 2 * 8 + tx % 4 * 2 + t % 2, tx % 32 // 4])
        for step in T.unroll(steps):
            for near in T.unroll(2):
                at = (j * steps + step) * 8 + near * 4
                t0 = (step * 16 + near * 8) % C // 8 * 2
                of = (j * R + (step * 16 + near * 8) // C) * 2
                for e in T.vectorized(2):
                    lo[e] = f32(left[at + e]) + f32(held[of])
                for e in T.vectorized(2):
                    hi[e] = f32(left[at + 2 + e]) + f32(held[of + 1])
                for e in T.vectorized(2):
                    left[at + e] = bf16(scalar.turned(lo[e], hi[e], cos[t0 + e], sin[t0 + e]).lo)
                for e in T.vectorized(2):
                    left[at + 2 + e] = bf16(scalar.turned(lo[e], hi[e], cos[t0 + e], sin[t0 + e]).hi)

    @T.macro
    def biased(left, held, j):
        for step in T.unroll(steps):
            for near in T.unroll(2):
                at = (j * steps + step) * 8 + near * 4
                of = (j * R + (step * 16 + near * 8) // C) * 2
                for e in T.vectorized(2):
                    left[at + e] = left[at + e] + held[of]
                for e in T.vectorized(2):
                    left[at + 2 + e] = left[at + 2 + e] + held[of + 1]

    @T.macro
    def turn(mine, raw_s, cs_s, n, tx):
        end_batch(0, mine.acc)
        for j in T.unroll(blocks):
            for step in T.unroll(steps):
                source = raw_s[
                    loads.at(
                        n, step * 16 + tx % 32 // 16 * 8 + tx % 8, tx % 16 // 8 * half + (j * warps + tx // 32) * 8
                    )
                ]
                T.ptx_ldmatrix(
                    T.bool(True), 4, T.access_ptr(source, "r", extent=8),
                    T.access_ptr(mine.left[(j * steps + step) * 8], "w", extent=8),
                )  # fmt: skip
            if (j + 1) * warps <= A // 8:
                rotated(mine.left, mine.held, cs_s, loads.slot(n) * (A // 4), j, tx)
            else:
                if j * warps + tx // 32 < A // 8:
                    rotated(mine.left, mine.held, cs_s, loads.slot(n) * (A // 4), j, tx)
                else:
                    biased(mine.left, mine.held, j)
        T.fence_proxy_async()

    @T.macro
    def add(mine, x_s, n):
        begin_batch(mine.left, mine.acc)
        for j in T.unroll(blocks):
            for q in T.unroll(panels):
                for step in T.unroll(steps):
                    T.ptx_wgmma_rs(
                        F32, "m64n64k16", False, "bf16", "bf16", "fp32", mine.left.data, (j * steps + step) * 8,
                        mine.desc.data, (q * 2 * M + step * 16) * 8 + n % 2 * (M * 8),
                        mine.acc.data, (j * panels + q) * 32, 1, 1, 1,
                    )  # fmt: skip
        T.warpgroup_commit_batch()

    @T.macro
    def store(mine, out, b, h, tx):
        end_batch(0, mine.acc)
        for j in T.unroll(blocks):
            for c in T.unroll(P // 4):
                state = (j * warps + tx // 32) * 8 + tx % 32 // 4 + c % 2 * half
                for e in T.vectorized(2):
                    out[b, h, state, c // 2 * 8 + tx % 4 * 2 + e] = mine.acc[j * (P // 2) + c * 2 + e]

    return Outer(
        lambda: (
            T.alloc_local((regs,), F32), T.alloc_local((blocks * steps * 8,), BF16),
            T.alloc_local((blocks * R * 2,), BF16),
        ),
        2, lambda x_s: {x_s: swizzled_lines(x_s)}, begin, turn, add, store,
    )  # fmt: skip
